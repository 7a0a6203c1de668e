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

-- Where trajectories were read from. `source_id` and `row` of a trajectory name its place: row `row` of that source.
CREATE TABLE trace_sources (
    run VARCHAR, source_id INTEGER,
    path VARCHAR, format VARCHAR,
    "table" VARCHAR,                -- trajectories, syncs or buffer
    rows BIGINT,                    -- rows taken
    updates_per_version INTEGER,    -- optimizer updates between two versions; NULL: not stated
    log_probs VARCHAR[],            -- log-prob lists it holds, in the order behave, trainer, prox, theta
    fates VARCHAR[],                -- fates its format can tell; NULL: any. Trained alone tells nothing of what was lost
    version_offset INTEGER,         -- taken off every train_version, so that the run's first batch has lag 0
    repeated BIGINT                 -- rows left out: decided again later, as after a resume
);

-- One row a trajectory whatever became of it. A row without `session` stands for a group none of whose trajectories
-- is known (all failed): it counts as a group, not as a trajectory. Columns are those of the trace schema; those from
-- lag_newest on are derived, in versions unless said, and NULL where a version they need is unknown.
CREATE TABLE trajectories (
    run VARCHAR NOT NULL,
    trajectory_id INTEGER NOT NULL, -- from 0 in each run
    source_id INTEGER NOT NULL, "row" BIGINT NOT NULL,
    "group" VARCHAR NOT NULL, session INTEGER, turn INTEGER,
    fate VARCHAR NOT NULL, reasons VARCHAR[],
    submit_step INTEGER, decided_step INTEGER,
    t_submit DOUBLE, t_first_token DOUBLE, t_done DOUBLE, t_enqueue DOUBLE, t_decided DOUBLE,
    submit_version INTEGER, first_version INTEGER, last_version INTEGER,
    train_version INTEGER, train_minibatch INTEGER,
    prompt_length INTEGER, response_length INTEGER, loss_tokens INTEGER, rejected_tokens INTEGER,
    truncated BOOLEAN, turns INTEGER,
    reward FLOAT, reward_parts MAP(VARCHAR, DOUBLE), advantage FLOAT, prompt_key VARCHAR,
    lag_newest INTEGER,             -- train_version - newest version among its tokens
    lag_oldest INTEGER,             -- train_version - oldest version among its tokens
    lag_mean DOUBLE,                -- mean over its tokens; NULL if a token's version is unknown
    lag_updates DOUBLE,             -- lag_mean in optimizer updates: x updates_per_version + train_minibatch
    span INTEGER,                   -- newest - oldest version + 1
    lag_in_flight INTEGER,          -- part of lag_oldest gathered while it was generated: newest - oldest version
    lag_in_queue INTEGER,           -- part gathered from its last token to its training: lag_newest
    updates_per_version INTEGER     -- of its source
);

-- Generate calls of a trajectory in order; versions, tokens, engine, and times.
CREATE TABLE trajectory_segments (
    run VARCHAR NOT NULL, trajectory_id INTEGER NOT NULL,
    segment INTEGER NOT NULL,       -- from 0
    version INTEGER, start INTEGER, length INTEGER, server VARCHAR, t0 DOUBLE, t1 DOUBLE,
    prefill INTEGER,                -- tokens prefilled before it
    stop VARCHAR
);

-- Weight syncs, one row a version and replica (replica NULL: all of them, or not told apart).
CREATE TABLE syncs (
    run VARCHAR NOT NULL, source_id INTEGER NOT NULL, version INTEGER NOT NULL, replica VARCHAR, replica_version INTEGER,
    step INTEGER, t0 DOUBLE, t1 DOUBLE, abort_s DOUBLE, transfer_s DOUBLE, resume_s DOUBLE,
    aborted INTEGER, prefill_tokens BIGINT, payload_count INTEGER, payload_bytes BIGINT, payload_norm DOUBLE
);

-- Counts of groups in the buffer.
CREATE TABLE buffer_depth (
    run VARCHAR NOT NULL, source_id INTEGER NOT NULL, t DOUBLE, step INTEGER NOT NULL,
    pending INTEGER, running INTEGER, finished INTEGER, failed INTEGER, wait_s DOUBLE
);

-- Sums over loss tokens, from the log-prob lists of the traces. d is the total log-ratio: the last recorded log-prob along
-- trainer, prox, theta minus the behave log-prob, in nats, clamped to +-20; w = e^d, k3 = e^d - 1 - d.
-- n: loss tokens. listed: those that come from lists, not from sums that the writer kept; tail_ln2, tail_1: listed tokens
-- with |d| above ln 2 and above 1. clip_n: listed tokens of known advantage; clip_low, clip_high: those that the clipped
-- loss gives no gradient. Unknown step, lag or minibatch is NULL. lag is in versions, lag_updates in optimizer updates.

CREATE TABLE token_trajectories (
    run VARCHAR NOT NULL,
    source_id INTEGER, "row" BIGINT,  -- its place: row `row` of that source
    n INTEGER, listed INTEGER, clip_n INTEGER, clip_low INTEGER, clip_high INTEGER, tail_ln2 INTEGER, tail_1 INTEGER,
    nan INTEGER,                    -- loss tokens whose d is no number: they count nowhere else
    sum DOUBLE, abs_sum DOUBLE, sq_sum DOUBLE, k3_sum DOUBLE, w_sum DOUBLE, w2_sum DOUBLE, abs_max DOUBLE
);

CREATE TABLE token_cells (
    run VARCHAR NOT NULL,
    step INTEGER, lag INTEGER, minibatch INTEGER, lag_updates INTEGER,
    n BIGINT, listed BIGINT, clip_n BIGINT, clip_low BIGINT, clip_high BIGINT, tail_ln2 BIGINT, tail_1 BIGINT,
    sum DOUBLE, abs_sum DOUBLE, sq_sum DOUBLE, k3_sum DOUBLE, w_sum DOUBLE, w2_sum DOUBLE, abs_max DOUBLE
);

-- Of prox - behave where prox was recorded, else of d. cluster: hash of the prompt group. bin: of the behave log-prob b,
-- low <= |b| < high.
CREATE TABLE token_strata (
    run VARCHAR NOT NULL,
    cluster INTEGER, lag INTEGER, minibatch INTEGER, lag_updates INTEGER, bin INTEGER, low DOUBLE, high DOUBLE,
    n BIGINT, abs_sum DOUBLE, sq_sum DOUBLE
);

-- subset: which parts of d are summed: bit 1 theta - prox (update), 2 prox - trainer (staleness), 4 trainer - behave
-- (mismatch); parts that the recorded sets do not tell apart come together.
CREATE TABLE token_subsets (
    run VARCHAR NOT NULL,
    cluster INTEGER, subset INTEGER,
    n BIGINT, clip_n BIGINT, clip_low BIGINT, clip_high BIGINT,
    sum DOUBLE, abs_sum DOUBLE, sq_sum DOUBLE, k3_sum DOUBLE, w_sum DOUBLE, w2_sum DOUBLE
);

-- Listed tokens by |d|: low <= |d| < high.
CREATE TABLE token_histogram (
    run VARCHAR NOT NULL,
    lag INTEGER, bucket INTEGER, low DOUBLE, high DOUBLE,
    count BIGINT
);

-- Made from these after loading, one column a signal (mean over labels, finite values only):
--   steps            step, <signal>, ...          the audited run
--   baseline_steps   run, step, <signal>, ...     the baselines
