"""The world of any look, and how the embedded model is made: drawings as strangers make them.

    python -m recipes.world --out /tmp/drawings     # write images, print questions

README.md beside this file says what it needs and how to train.
"""
