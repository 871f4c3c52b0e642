"""Database access: tables, records and one repository per subject."""
