"""Training on plain drawings from nothing: images and questions are drawn while the model learns.

    python train.py recipes/shapes/shapes.yaml
    python -m recipes.shapes --out /tmp/shapes --n 8      # write images, print questions

README.md beside this file says what it makes.
"""
