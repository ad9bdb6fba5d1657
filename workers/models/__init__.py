"""The sharded models of a trainer rank."""
