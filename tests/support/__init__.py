"""The harness that runs a test's body on real ranks.

    pytest ── Channel ── fork server ── fork ──► rank 0, rank 1, ...
       │                (torch is loaded)         │
       └──────────────── RunFolder ───────────────┘
              job in; report, output, stack out

| file              | what it is for                                                   |
| ----------------- | ---------------------------------------------------------------- |
| `ranks.py`        | `on_ranks` and the fixture `ranks`, what tests use               |
| `run.py`          | one run: start the ranks, watch them, stop what is left          |
| `outcome.py`      | how a rank ended, and the failure that pytest shows              |
| `stack.py`        | where a stuck rank stood                                         |
| `fork_server.py`  | the process that has torch loaded and forks, signals, reaps      |
| `rank_process.py` | what happens inside a rank                                       |
| `channel.py`      | the few messages between the three                               |
| `run_folder.py`   | the files of one run                                             |
| `kernel.py`       | the Linux calls that Python has no name for                      |
| `leaks.py`        | what a test left behind                                          |
| `patience.py`     | limits on time that a busy machine does not trip                 |
| `hosts.py`        | several hosts on this machine: network namespaces                |
"""
