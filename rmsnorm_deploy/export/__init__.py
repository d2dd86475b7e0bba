"""The export: `python -m rmsnorm_deploy.export MODEL`, and its stages for use from Python (`pipeline`)."""
