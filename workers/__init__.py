"""FSDP workers (actor, reference, critic) and the worker groups that call them under Ray and under torchrun."""
