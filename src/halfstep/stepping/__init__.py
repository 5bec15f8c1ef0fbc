"""The engine under every face: casting, scaling, masters, stepping."""
