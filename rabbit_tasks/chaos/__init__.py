"""A loss test for the user's own broker: `rabbit-tasks chaos`.

    plan        what happens to each task, decided by a seed
    app         the consumer: does the work, dies of it, and writes down what it did
    ledger      what was written down, outside of the broker
    queues      the run's own queues: made, looked into, removed
    post        publishes the tasks, each until it is confirmed
    fleet       the worker processes, kept alive by their supervisor
    hurts       the command that hurts the broker
    trial       all of these together: one run
    account     the ledger and what is left on the broker → where every task is, and why it ran twice
    plot        the rate over time, as text and as SVG

The account believes the ledger and the broker, never the workers' own counts.
"""
