"""``python -m decode_service`` starts one decode worker, with the settings of ``kvbaton decode``."""

import sys

from cli.main import main

if __name__ == "__main__":
    main(["decode", *sys.argv[1:]])
