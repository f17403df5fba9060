"""How fast: rabbit_tasks beside raw aio-pika, raw aiormq and its peers, on one broker in one run.

python -m bench                                 every measure, five rounds
python -m bench quick                           every measure in under three minutes
python -m bench check                           exit 1 where one is far from its goal, and which
python -m bench drain-64 latency --rounds 9     some of them
python -m bench --against aiormq,celery         beside whom. All of them: pip install '.[bench]'
python -m bench growth --most 1000000           what a message costs beside many others, or large ones
python -m bench profile drain-64                where the CPU time of rabbit_tasks goes

The broker is that of RABBIT_TASKS_URL. Queues are of the run's own, named bench.<run>.…, and removed in
the end, after Ctrl-C as well. Contenders work one at a time, each in a process of its own, in turns,
so that all see the same weather; what counts are the ratios, each of two neighbours in one round.
"""
