"""A tool for `experiment=smollm2_tools`."""

import operator

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculate(left: int, operation: str, right: int) -> int:
    """Calculate with two whole numbers.

    Args:
        left: The first number.
        operation: One of +, - and *.
        right: The second number.
    """
    return OPERATIONS[operation](left, right)
