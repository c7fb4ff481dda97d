"""Rules of games and boards drawn by seed."""
