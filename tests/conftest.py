"""What holds for every test."""

from engine import environment

environment.prepare()  # before any test module imports torch
