"""Push one file of safetensors to a server: pushing.py FILE HOST:PORT verify|trust; prints how far it got.

Run as a script, so that its memory can be watched from outside.
"""

import sys

import weightwire


def main() -> None:
    """Push, and say what was sent."""
    path, endpoint, verify = sys.argv[1:4]
    with weightwire.connect(endpoint) as connection:
        # Everything a push needs is imported by now, as it would be in a program that has been running for a while.
        print("connected", flush=True)
        sys.stdin.readline()
        summary = connection.push(path, verify=verify == "verify").summary
        print(summary.sent, summary.hashes_known, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
