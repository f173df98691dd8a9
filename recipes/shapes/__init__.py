"""Training on plain drawings from nothing: images and questions are drawn while the model learns.

    python train.py recipes/shapes/shapes.yaml

README.md beside this file says what it makes.
"""
