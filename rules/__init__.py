"""The rule library: one YAML file a rule, in folders by step."""
