"""Tests of towers."""
