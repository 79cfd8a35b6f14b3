"""Tests of the process that converts files of models."""
