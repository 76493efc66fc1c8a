"""From a run directory to tables. Imports `agents.events` and nothing else of ours."""
