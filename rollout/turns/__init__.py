"""Episodes of several turns: the tree of turns, sessions, environments, agents and the address that agents speak to."""
