//! Precedence, the file, and every misuse of a setting.

use std::env::VarError;
use std::path::Path;

use super::*;

fn no_environment(_: &str) -> Result<String, VarError> {
    Err(VarError::NotPresent)
}

fn with_file(text: &str) -> Result<Resolved> {
    let file = layers::parse_file(Path::new("/f.toml"), text)?;
    Resolved::from_layers(&Flags::new(), &no_environment, &file)
}

fn defaults() -> Resolved {
    with_file("").expect("the defaults are valid")
}

#[track_caller]
fn check_file_is_refused(text: &str, expected: &str) {
    let error = with_file(text).expect_err(text);
    let line = format!("{}; {}", error.report(), error.fix().unwrap_or_default());
    assert!(line.contains(expected), "{text:?}\n gave {line}\n not {expected}");
    assert_eq!(error.kind(), crate::error::Kind::InvalidArgument);
}

#[test]
fn defaults_are_the_contract() {
    let Resolved { config, values } = defaults();
    assert_eq!(config.control, Path::new("/run/blockd/control.sock"));
    assert_eq!(config.store.to_string(), "file:///var/lib/blockd/store");
    assert_eq!(config.log_dir, Path::new("/var/lib/blockd/log"));
    assert_eq!(config.cache_dir, Path::new("/var/lib/blockd/cache"));
    assert_eq!((config.log_bytes_max, config.cache_bytes_max), (8 << 30, 10 << 30));
    assert_eq!((config.lease_time.as_secs(), config.heartbeat_interval.as_secs()), (30, 10));
    assert!(config.store_is_inside_state_dir());
    assert!(values.values().all(|value| value.origin == Origin::Default));
    assert_eq!(values.len(), settings::all().count());
}

#[test]
fn a_flag_beats_a_variable_beats_the_file_beats_the_default() {
    let file = "cut-bytes = \"3M\"\ncut-age = \"3s\"\nlog-sync = \"dsync\"";
    let file = layers::parse_file(Path::new("/f.toml"), file).unwrap();
    let environment = |name: &str| match name {
        "BLOCKD_CUT_BYTES" => Ok("2M".to_owned()),
        "BLOCKD_CUT_AGE" => Ok("2s".to_owned()),
        "BLOCKD_LOG_SYNC" => Ok(String::new()),
        _ => Err(VarError::NotPresent),
    };
    let flags = Flags::from([("cut-bytes", "1M".to_owned())]);
    let Resolved { config, values } = Resolved::from_layers(&flags, &environment, &file).unwrap();
    assert_eq!(config.cut_bytes, 1 << 20);
    assert_eq!(config.cut_age, Duration::from_secs(2));
    assert_eq!(config.log_sync, LogSync::Dsync, "an empty variable counts as unset");
    assert_eq!(config.drain_concurrency, 4);
    let origin = |name| values[name].origin.to_string();
    assert_eq!(origin("cut-bytes"), "--cut-bytes");
    assert_eq!(origin("cut-age"), "BLOCKD_CUT_AGE");
    assert_eq!(origin("log-sync"), "/f.toml:3");
    assert_eq!(origin("drain-concurrency"), "default");
}

#[test]
fn defaults_follow_the_folders_they_are_in() {
    let Resolved { config, .. } =
        with_file("state-dir = \"/srv/b/\"\nruntime-dir = \"/tmp/r\"").unwrap();
    assert_eq!(config.log_dir, Path::new("/srv/b/log"));
    assert_eq!(config.store.to_string(), "file:///srv/b/store");
    assert_eq!(config.control, Path::new("/tmp/r/control.sock"));
    assert_eq!(config.staging_path, Path::new("/tmp/r/staging"));
}

#[test]
fn every_setting_refuses_an_empty_value_by_its_name() {
    for setting in settings::all() {
        check_file_is_refused(
            &format!("\n{} = \"\"", setting.name),
            &format!("/f.toml:2: {}", setting.name),
        );
    }
}

#[test]
fn each_mistake_in_the_file_is_named_with_its_line() {
    for (text, expected) in [
        ("cut-age = 5s", "/f.toml:1: "),
        ("cut-age \"5s\"", "/f.toml:1: "),
        ("\n\ncut-age = \"5s\"\ncut-age = \"5s\"", "/f.toml:4: "),
        (
            "# x\ncache-bytes = \"1G\"",
            "/f.toml:2: there is no setting \"cache-bytes\"; perhaps cache-bytes-max",
        ),
        ("cache_bytes_max = \"1G\"", "perhaps cache-bytes-max is meant"),
        (
            "zzz = 1",
            "/f.toml:1: there is no setting \"zzz\"; blockd config check lists the settings",
        ),
        ("[log]\nbytes = 1", "there is no setting \"log\""),
        ("cut-age = [1]", "/f.toml:1: cut-age has a value of type array"),
        ("cut-age = 1.5", "cut-age has a value of type float; write it as cut-age = \"5s\""),
        ("cut-age = 5", "cut-age: \"5\" is not a duration; write it with its unit"),
        ("cut-age = \"1ms\"", "cut-age: 1ms is too short; at least 100 ms"),
        ("cache-bytes-max = \"10X\"", "cache-bytes-max: \"10X\" is not a size; write"),
        ("cache-bytes-max = 4096", "4096 is too small; at least 16 MiB"),
        ("cut-bytes = \"2G\"", "2G is too large; at most 1 GiB"),
        ("drain-concurrency = 0", "\"0\" is not a count; from 1 to 256"),
        ("drain-concurrency = -1", "\"-1\" is not a count"),
        ("allow-buffered-log = \"yes\"", "\"yes\" is not a choice; write true or false"),
        ("log-sync = \"fsync\"", "write auto, fdatasync or dsync"),
        ("compression = \"lz4\"", "write zstd or none"),
        ("log-level = \"loud=very\"", "write error, warn, info, debug or trace"),
        ("state-dir = \"blockd\"", "\"blockd\" is not an absolute path; start it with /"),
        ("store = \"s3://\"", "store: store url \"s3://…\": the bucket must have"),
    ] {
        check_file_is_refused(text, expected);
    }
    let long = format!("control = \"/{}\"", "x".repeat(107));
    check_file_is_refused(&long, "a path of 108 bytes; a socket's path has at most 107");
}

#[test]
fn settings_that_contradict_each_other_are_refused_where_they_were_written() {
    for (text, expected) in [
        (
            "heartbeat-interval = \"20s\"",
            "/f.toml:1: heartbeat-interval 20s is more than half of lease-time 30s",
        ),
        (
            "lease-time = \"10s\"",
            "/f.toml:1: heartbeat-interval 10s is more than half of lease-time 10s",
        ),
        ("log-bytes-max = \"128M\"", "log-segments-ready 4 takes more than a quarter"),
        (
            "log-bytes-max = \"1G\"\ncut-bytes = \"512M\"",
            "/f.toml:2: cut-bytes 512M is more than a quarter",
        ),
        ("staging-bytes = \"200M\"", "lower staging-bytes or raise memory-bytes-max"),
    ] {
        check_file_is_refused(text, expected);
    }
}

#[test]
fn the_parts_of_memory_are_the_whole() {
    let Resolved { config, .. } = with_file("memory-bytes-max = \"256M\"").unwrap();
    let budget = config.memory();
    let sum = budget.staging_bytes + budget.map_bytes + budget.dirty_bytes + budget.cache_bytes;
    assert_eq!(sum, config.memory_bytes_max);
}

#[test]
fn numbers_and_truths_need_no_quotes() {
    let Resolved { config, .. } =
        with_file("cut-bytes = 2_097_152\nallow-buffered-log = true\nconnections-max = 0x10")
            .unwrap();
    assert_eq!(
        (config.cut_bytes, config.allow_buffered_log, config.connections_max),
        (2 << 20, true, 16)
    );
}

#[test]
fn the_default_file_may_be_missing_and_a_named_one_may_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("none.toml");
    assert!(layers::read_file(&path, true).unwrap().is_empty());
    let error = Resolved::load(Some(&path), &Flags::new(), &no_environment).unwrap_err();
    assert!(error.report().contains(path.to_str().unwrap()), "{}", error.report());
    let variable = |name: &str| match name {
        "BLOCKD_CONFIG" => Ok(path.to_str().unwrap().to_owned()),
        _ => Err(VarError::NotPresent),
    };
    assert!(Resolved::load(None, &Flags::new(), &variable).is_err());
    assert!(layers::read_file(folder.path(), true).is_err(), "a folder is not a missing file");
}

#[test]
fn no_message_and_no_listing_repeats_what_could_be_a_secret() {
    for text in [
        "s3://key:hunter2@b",
        "s3://bkt?secret=hunter2",
        "s3://bkt?endpoint=http://u:hunter2@h",
        "hunter2",
    ] {
        let flags = Flags::from([("store", text.to_owned())]);
        let error = Resolved::from_layers(&flags, &no_environment, &BTreeMap::new()).unwrap_err();
        assert!(!format!("{error:?} {:?}", error.fix()).contains("hunter2"), "{error:?}");
    }
}

#[test]
fn the_packaged_file_explains_every_setting_and_its_lines_are_the_defaults() {
    let text = include_str!("../../../packaging/blockd.toml");
    assert!(layers::parse_file(Path::new("/f.toml"), text).unwrap().is_empty(), "it sets nothing");
    // A line of a setting has no blank after its mark; explanations have.
    let is_setting =
        |line: &&str| line.strip_prefix('#').is_some_and(|l| l.starts_with(char::is_alphabetic));
    let lines: Vec<_> = text.lines().filter(is_setting).map(|line| &line[1..]).collect();
    let file = layers::parse_file(Path::new("/f.toml"), &lines.join("\n")).unwrap();
    let default = defaults();
    for setting in settings::all() {
        let value = file.get(setting.name).unwrap_or_else(|| panic!("{} is missing", setting.name));
        assert_eq!(value.text, default.values[setting.name].text, "{}", setting.name);
    }
    assert_eq!(with_file(&lines.join("\n")).unwrap().config, default.config);
}
