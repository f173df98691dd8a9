"""How models were made: each package brings its own settings, requirements, tests and page. Nothing below
knows them; `train.py` and `python -m eval` find one by its name. `flags` draws configs/flags.yaml's rows."""
