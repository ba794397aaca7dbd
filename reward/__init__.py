"""Reward: reward models: pairs, features, training, evaluation, gate, scoring."""
