"""``python -m prefill_service`` starts one prefill worker, with the settings of ``kvbaton prefill``."""

import sys

from cli.main import main

if __name__ == "__main__":
    main(["prefill", *sys.argv[1:]])
