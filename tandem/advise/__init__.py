"""What `tandem advise` knows: rounds of measured answers, what a smaller k would have made of them, what to do.

All of it is pure: `tandem/bench` measures, and `tandem/cli/advise_run.py` joins the two.

1. `replay.py`: the rounds of an answer that was drafted with the largest k, as a smaller k would have had them.
2. `times.py`: how long a round takes, by the number of its drafted tokens and by stage.
3. `predict.py`: both together, tokens per second for every k, with formulas from `tandem/speedup.py`.
4. `verdict.py`: one paragraph that says what to do.
5. `report.py`, `tables.py`, `page.py` with `pictures.py` and `svg.py`: JSON, a terminal, HTML.
"""
