"""Room 3: tables to measures, named quantities with unit, window, n and interval. All statistics live here."""
