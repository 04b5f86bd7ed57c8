//! The suite that every driver must pass: what [`ObjectStore`] promises, as checks.
