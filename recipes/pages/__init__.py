"""Made pages with their truth, to score how well a model reads: `python -m recipes.pages.make --out FOLDER`.

README.md beside this file says what is on them.
"""
