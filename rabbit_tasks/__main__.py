"""`python -m rabbit_tasks` is `rabbit-tasks`."""

from rabbit_tasks.cli import main

if __name__ == "__main__":
    main()
