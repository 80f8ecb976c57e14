"""Scoring functions, and the program that runs one of them in a process that may be killed.

A reward is `def reward(case: RewardCase, **reward_args) -> float`. It runs outside the supervisor:
it may hang, eat memory, exit or crash, and costs its own sample only.
"""
