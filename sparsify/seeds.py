"""Numbers that look random, from numbers that do not."""

from __future__ import annotations


def scrambled(number: int) -> int:
    """A bijection of 64 bits in which every input bit moves half of the output bits: splitmix64's last step,
    Steele et al. 2014.
    """
    number &= 2**64 - 1
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31
