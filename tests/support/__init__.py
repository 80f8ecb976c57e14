"""Typed fakes and fixtures shared by the tests."""
