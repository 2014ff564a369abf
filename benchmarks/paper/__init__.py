"""The ZeRO paper: its numbers (printed), the planner's predictions of them (predicted), and measurements (measured)."""
