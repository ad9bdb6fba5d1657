"""The product's heart: seeds, the numerics environment, canonical sums, digests, the ledger and its comparison."""
