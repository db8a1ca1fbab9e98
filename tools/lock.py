"""Print a constraints file with the exact version of every package in this virtual environment.

Local build tags are removed (``torch==2.13.0``, not ``2.13.0+cpu``), so that any build of a version fits.
"""

from importlib.metadata import distributions

NOT_LOCKED = {"kvbaton", "kvbaton-client", "pip", "setuptools", "wheel"}
HEADER = (
    "# Everything that CI uses, at the versions that it was last seen to work with. Written by `make lock`."
)


def main() -> None:
    """Write the lock to standard output."""
    versions = {
        dist.metadata["Name"].lower().replace("_", "-"): dist.version.partition("+")[0]
        for dist in distributions()
    }
    print(HEADER)
    for name in sorted(versions.keys() - NOT_LOCKED):
        print(f"{name}=={versions[name]}")


if __name__ == "__main__":
    main()
