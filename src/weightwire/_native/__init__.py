"""The compiled modules. Private: ``weightwire.transport`` and ``weightwire.hashing`` are their only users."""
