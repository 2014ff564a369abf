"""One of the ranks that `zeroshard train` starts: python -m zeroshard.train DIRECTORY."""

import signal
import sys
from pathlib import Path

from zeroshard.utils.lazy_import import uncollected_imports

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no stack trace of Ctrl-C before the rank can stop in order
    with uncollected_imports():
        from zeroshard.train.launch import run_local_rank

    run_local_rank(Path(sys.argv[1]))
