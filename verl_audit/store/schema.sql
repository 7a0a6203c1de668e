-- Every table and view of the store. Rules and users write SQL against these, so they change only with a
-- schema_version. Times are Unix seconds, lengths are tokens unless said, shares are 0..1.

CREATE TABLE meta (schema_version INTEGER, tool_version VARCHAR);

-- Behind the views raw_metrics and metrics, which spell keys and kinds out; these tables may change at any time.
CREATE TYPE value_kind AS ENUM ('finite', 'nan', 'inf', 'nonfinite_unknown', 'clamped', 'rounded');
CREATE TABLE keys (key_id INTEGER PRIMARY KEY, key VARCHAR NOT NULL);
CREATE TABLE raw_values (
    source_id INTEGER NOT NULL, segment INTEGER NOT NULL, record BIGINT NOT NULL, step BIGINT NOT NULL,
    axis_step BIGINT NOT NULL, key_id INTEGER NOT NULL, value DOUBLE NOT NULL, kind value_kind NOT NULL, wall_time DOUBLE
);
CREATE TABLE repeated (source_id INTEGER NOT NULL);  -- sources with a record that holds a key twice
CREATE TABLE kept_sources (  -- what `--db` needs to read only new files next time; raw_values holds the rows of all of them
    place VARCHAR NOT NULL, stamp VARCHAR NOT NULL, parts INTEGER NOT NULL, source_id INTEGER NOT NULL, state BLOB NOT NULL
);
CREATE TABLE metric_values (
    source_id INTEGER NOT NULL, segment INTEGER NOT NULL, key_id INTEGER NOT NULL, step BIGINT NOT NULL,
    value DOUBLE NOT NULL, kind value_kind NOT NULL, wall_time DOUBLE
);

-- One row a run: the audited one (role 'run') and the baselines (role 'baseline').
CREATE TABLE runs (
    run VARCHAR PRIMARY KEY,
    role VARCHAR NOT NULL,
    name VARCHAR NOT NULL,          -- as the sources call it
    because VARCHAR                 -- why these sources were taken for one run
);

-- One row a file and format. `stream` groups the files of one tracker: its segments follow one another in time.
CREATE TABLE sources (
    source_id INTEGER PRIMARY KEY,
    path VARCHAR NOT NULL,
    format VARCHAR NOT NULL,
    step_kind VARCHAR NOT NULL,     -- logged: the framework's step; counter: the tracker's count of log calls
    precision VARCHAR NOT NULL,     -- float64, float32, rounded (few decimals) or sampled (a selection of the rows)
    bytes BIGINT NOT NULL,
    records BIGINT NOT NULL,        -- log calls
    values_read BIGINT NOT NULL,
    values_lost BIGINT NOT NULL     -- known to have been written and not recovered
);

-- Process lives in a source, and which run each belongs to. `ord` orders the lives of one stream in time.
CREATE TABLE segments (
    source_id INTEGER NOT NULL,
    segment INTEGER NOT NULL,
    run VARCHAR NOT NULL,
    ord INTEGER NOT NULL,
    PRIMARY KEY (source_id, segment)
);

-- Every value as logged, one row each. kind: finite, nan, inf, nonfinite_unknown, clamped, rounded.
CREATE VIEW raw_metrics AS
SELECT source_id,
       segment,
       record,                      -- log call within the source, from 0
       step,                        -- as logged; counted from 1 where a console prints none
       axis_step,                   -- the version that trained on the values: differs where the framework logs late
       key,
       value,
       kind::VARCHAR AS kind,
       wall_time
FROM raw_values JOIN keys USING (key_id) SEMI JOIN sources USING (source_id);

-- One row per run, key and step: the last process life of each tracker, then the most exact tracker.
CREATE VIEW metrics AS
SELECT run, key, step, value, kind::VARCHAR AS kind, wall_time, source_id
FROM metric_values JOIN keys USING (key_id) JOIN segments USING (source_id, segment);

-- (run, key, step) that two trackers report differently, beyond what their formats round.
CREATE TABLE differences (run VARCHAR, key VARCHAR, step BIGINT, source_a VARCHAR, a DOUBLE, source_b VARCHAR, b DOUBLE);

-- Values of an earlier process life that a later one replaced: it began again at or before their step. `later` is what
-- it logged instead, NULL where it never came to that step. Only these differ from what `metrics` holds.
CREATE TABLE rewritten (run VARCHAR, key VARCHAR, step BIGINT, source VARCHAR, earlier DOUBLE, later DOUBLE);

-- How each key of a run was understood. mapped: it is a signal; known: understood, no rule needs it; unknown: kept, queryable.
CREATE TABLE key_map (
    run VARCHAR, key VARCHAR, standing VARCHAR, signal VARCHAR, label VARCHAR,
    unit_kind VARCHAR, against VARCHAR, contains VARCHAR, weight VARCHAR, reducer VARCHAR, on_policy DOUBLE,
    scale DOUBLE, "offset" DOUBLE,
    inert_because VARCHAR,          -- logged, and cannot move in this configuration
    corrupt_because VARCHAR,        -- logged, and does not mean what its name says here; left out of signals
    zero_with VARCHAR               -- companion key: where it is logged and this one is not, the value is 0
);

-- Canonical series. `derived` marks zeros filled in for a key that the framework leaves out at 0.
CREATE TABLE signals (
    run VARCHAR, role VARCHAR, signal VARCHAR, label VARCHAR, step BIGINT, value DOUBLE, kind VARCHAR,
    key VARCHAR, inert BOOLEAN, derived BOOLEAN
);

CREATE TABLE facts (run VARCHAR, fact VARCHAR, value VARCHAR, reason VARCHAR);
CREATE TABLE config (run VARCHAR, key VARCHAR, value VARCHAR, origin VARCHAR);
CREATE TABLE events (run VARCHAR, path VARCHAR, kind VARCHAR, step BIGINT, detail VARCHAR, "offset" BIGINT);
CREATE TABLE problems (path VARCHAR, "offset" BIGINT, kind VARCHAR, detail VARCHAR, count BIGINT);

-- Rows of generation dumps; lengths in characters, text is never stored.
CREATE TABLE samples (
    run VARCHAR, split VARCHAR, step BIGINT, uid VARCHAR, score DOUBLE, input_chars BIGINT, output_chars BIGINT,
    padding BOOLEAN, data_source VARCHAR
);

-- Made from these after loading, one column a signal (mean over labels, finite values only):
--   steps            step, <signal>, ...          the audited run
--   baseline_steps   run, step, <signal>, ...     the baselines
