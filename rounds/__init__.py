"""Rounds: what turns the wheel: controller, policy update, gates, experiments, promotion."""
