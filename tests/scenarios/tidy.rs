//! The house rules that no compiler checks, as tests over the working tree.
//!
//! Each rule reads a [`Tree`] and returns what breaks it, naming file and line. The tree of this
//! very checkout must break none; and since a rule that cannot fail is no rule, each one is also
//! shown a small tree that follows every rule but that one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use tempfile::TempDir;
use toml::{Table, Value};

/// What each rule is: a look at the whole tree that returns one line per violation.
type Rule = fn(&Tree) -> Vec<String>;

const RULES: &[Rule] = &[
    top_level_is_the_agreed_one,
    crates_import_only_what_their_place_allows,
    every_crate_is_a_member_with_the_shared_lints,
    there_is_one_clippy_toml,
    sources_are_short,
    sources_open_with_what_they_promise,
    only_the_log_may_hold_unsafe_code,
    nothing_is_left_unfinished,
    every_scenario_is_compiled,
    the_architecture_names_files_that_exist,
];

const TOP_LEVEL: &[&str] = &[
    ".ci",
    ".git",
    ".gitignore",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "Cargo.lock",
    "Cargo.toml",
    "README.md",
    "SECURITY.md",
    "bench",
    "blockd",
    "clippy.toml",
    "fuzz",
    "nbd-server",
    "packaging",
    "rustfmt.toml",
    "s3-backend",
    "scripts",
    "target",
    "tests",
    "wal",
];

/// Folders that tools make; nobody writes in them.
const NOT_OURS: &[&str] = &[".git", "target", "bench/out", "fuzz/artifacts", "fuzz/corpus"];

const SOURCE_LINES_MAX: usize = 600;
const ARCHITECTURE_LINES_MAX: usize = 300;

/// The crates that know nothing of one another, and the one that knows them.
const LEAVES: &[&str] = &["wal", "s3-backend", "nbd-server"];
const DAEMON: &str = "blockd";

/// Every file of a checkout by its path from the root; the text only of those that rules read.
struct Tree {
    files: BTreeMap<String, String>,
}

impl Tree {
    fn load(root: &Path) -> Self {
        let mut tree = Self { files: BTreeMap::new() };
        tree.load_folder(root, "");
        tree
    }

    fn load_folder(&mut self, folder: &Path, prefix: &str) {
        for entry in fs::read_dir(folder).expect("the tree is readable") {
            let entry = entry.expect("the tree is readable");
            let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
            // A folder that another test removes meanwhile is not the tree's.
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_dir() {
                if !NOT_OURS.contains(&path.as_str()) {
                    self.load_folder(&entry.path(), &format!("{path}/"));
                }
            } else {
                let is_text = [".rs", ".toml", ".md"].iter().any(|end| path.ends_with(end));
                let bytes =
                    if is_text { fs::read(entry.path()).unwrap_or_default() } else { vec![] };
                self.files.insert(path, String::from_utf8_lossy(&bytes).into_owned());
            }
        }
    }

    fn sources(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files
            .iter()
            .filter(|(path, _)| path.ends_with(".rs"))
            .map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// The manifests below the root, by folder.
    fn crates(&self) -> Vec<(&str, Table)> {
        let manifests = self.files.iter().filter_map(|(path, text)| {
            let folder = path.strip_suffix("/Cargo.toml")?;
            Some((folder, parse(path, text)))
        });
        manifests.collect()
    }

    /// Whether `name` is a file or folder, from the root or from any folder.
    fn has(&self, name: &str) -> bool {
        let (as_file, as_folder) = (format!("/{name}"), format!("/{name}/"));
        self.files.keys().any(|path| {
            let path = format!("/{path}");
            path.ends_with(&as_file) || path.contains(&as_folder)
        })
    }
}

fn parse(path: &str, text: &str) -> Table {
    text.parse().unwrap_or_else(|error| panic!("{path} is not TOML: {error}"))
}

fn package_name(manifest: &Table) -> Option<&str> {
    manifest.get("package")?.get("name")?.as_str()
}

/// The packages that a manifest imports, in any kind of dependency table and under any alias.
fn imports(manifest: &Table) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (key, value) in manifest {
        let Some(table) = value.as_table() else { continue };
        if key.ends_with("dependencies") {
            for (alias, dependency) in table {
                let package = dependency.get("package").and_then(Value::as_str);
                found.insert(package.unwrap_or(alias).to_owned());
            }
        } else if key == "target" {
            found.extend(table.values().filter_map(Value::as_table).flat_map(imports));
        }
    }
    found
}

fn top_level_is_the_agreed_one(tree: &Tree) -> Vec<String> {
    let top: BTreeSet<&str> =
        tree.files.keys().map(|path| path.split('/').next().unwrap_or(path)).collect();
    let strangers = top.into_iter().filter(|name| !TOP_LEVEL.contains(name));
    strangers.map(|name| format!("{name}: not part of the agreed top level")).collect()
}

fn crates_import_only_what_their_place_allows(tree: &Tree) -> Vec<String> {
    let crates = tree.crates();
    let ours: BTreeSet<&str> =
        crates.iter().filter_map(|(_, manifest)| package_name(manifest)).collect();
    let mut violations = Vec::new();
    for (folder, manifest) in &crates {
        let name = package_name(manifest).unwrap_or_default();
        for import in imports(manifest).iter().filter(|import| ours.contains(import.as_str())) {
            let allowed = if LEAVES.contains(&name) {
                false
            } else if name == DAEMON {
                LEAVES.contains(&import.as_str())
            } else {
                import == DAEMON || LEAVES.contains(&import.as_str())
            };
            if !allowed {
                violations.push(format!("{folder}/Cargo.toml: {name} must not import {import}"));
            }
        }
    }
    violations
}

fn every_crate_is_a_member_with_the_shared_lints(tree: &Tree) -> Vec<String> {
    let root = parse("Cargo.toml", tree.files.get("Cargo.toml").map_or("", String::as_str));
    let members = root.get("workspace").and_then(|workspace| workspace.get("members")?.as_array());
    let mut violations = Vec::new();
    for (folder, manifest) in tree.crates() {
        if !members.is_some_and(|members| members.iter().any(|m| m.as_str() == Some(folder))) {
            violations.push(format!("{folder}/Cargo.toml: not a member of the workspace"));
        }
        let lints = manifest.get("lints").and_then(|lints| lints.get("workspace")?.as_bool());
        if lints != Some(true) {
            violations.push(format!("{folder}/Cargo.toml: lacks `[lints] workspace = true`"));
        }
    }
    violations
}

fn there_is_one_clippy_toml(tree: &Tree) -> Vec<String> {
    let names = ["clippy.toml", ".clippy.toml"];
    let found = tree
        .files
        .keys()
        .filter(|path| path.rsplit('/').next().is_some_and(|name| names.contains(&name)));
    let mut violations: Vec<String> = found
        .filter(|path| *path != "clippy.toml")
        .map(|path| format!("{path}: clippy takes the nearest one and would drop the root's"))
        .collect();
    if !tree.files.contains_key("clippy.toml") {
        violations.push("clippy.toml: missing".to_owned());
    }
    violations
}

fn sources_are_short(tree: &Tree) -> Vec<String> {
    let too_long = tree.sources().filter_map(|(path, text)| {
        let lines = text.lines().count();
        (lines > SOURCE_LINES_MAX)
            .then(|| format!("{path}: {lines} lines, {SOURCE_LINES_MAX} are allowed"))
    });
    too_long.collect()
}

fn sources_open_with_what_they_promise(tree: &Tree) -> Vec<String> {
    let silent = tree.sources().filter(|(_, text)| {
        let first =
            text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with("#!"));
        !first.is_some_and(|line| line.starts_with("//!") && line.len() > "//!".len())
    });
    silent.map(|(path, _)| format!("{path}: does not open with `//!`")).collect()
}

/// The files at which the compiler enters a crate, as far as they exist.
fn crate_roots<'tree>(
    tree: &'tree Tree,
    folder: &str,
    manifest: &Table,
) -> Vec<(&'tree str, &'tree str)> {
    let mut roots = vec!["src/lib.rs".to_owned(), "src/main.rs".to_owned(), "build.rs".to_owned()];
    let declared = manifest.iter().filter(|(key, _)| *key == "lib" || *key == "test");
    for (_, target) in declared {
        let targets = target.as_array().map_or(std::slice::from_ref(target), Vec::as_slice);
        let paths = targets.iter().filter_map(|target| target.get("path")?.as_str());
        roots.extend(paths.map(str::to_owned));
    }
    let present =
        roots.iter().filter_map(|root| tree.files.get_key_value(&format!("{folder}/{root}")));
    present.map(|(path, text)| (path.as_str(), text.as_str())).collect()
}

fn only_the_log_may_hold_unsafe_code(tree: &Tree) -> Vec<String> {
    let mut violations = Vec::new();
    for (folder, manifest) in tree.crates() {
        if package_name(&manifest) == Some("wal") {
            continue;
        }
        for (path, text) in crate_roots(tree, folder, &manifest) {
            if !text.lines().any(|line| line.trim() == "#![forbid(unsafe_code)]") {
                violations.push(format!("{path}: lacks `#![forbid(unsafe_code)]`"));
            }
        }
    }
    violations
}

fn nothing_is_left_unfinished(tree: &Tree) -> Vec<String> {
    // In two halves each, or this file would break its own rule.
    let marks = [("to", "do!("), ("unimple", "mented!("), ("#[ign", "ore"), ("FIX", "ME")]
        .map(|(head, tail)| format!("{head}{tail}"));
    let mut violations = Vec::new();
    for (path, text) in tree.sources() {
        for (index, line) in text.lines().enumerate() {
            for mark in marks.iter().filter(|mark| line.contains(mark.as_str())) {
                violations.push(format!("{path}:{}: {mark} is unfinished work", index + 1));
            }
        }
    }
    violations
}

fn every_scenario_is_compiled(tree: &Tree) -> Vec<String> {
    let folder = "tests/scenarios/";
    let main = tree.files.get("tests/scenarios/main.rs").map_or("", String::as_str);
    let modules: BTreeSet<&str> = main
        .lines()
        .filter_map(|line| line.trim().strip_prefix("mod ")?.strip_suffix(';'))
        .collect();
    let forgotten = tree.sources().filter_map(|(path, _)| {
        let module = path.strip_prefix(folder)?.strip_suffix(".rs")?;
        let is_file_of_a_folder = module.contains('/');
        (module != "main" && !is_file_of_a_folder && !modules.contains(module))
            .then(|| format!("{path}: {folder}main.rs does not name it"))
    });
    forgotten.collect()
}

fn the_architecture_names_files_that_exist(tree: &Tree) -> Vec<String> {
    let Some(text) = tree.files.get("ARCHITECTURE.md") else { return Vec::new() };
    let mut violations = Vec::new();
    let lines = text.lines().count();
    if lines > ARCHITECTURE_LINES_MAX {
        violations
            .push(format!("ARCHITECTURE.md: {lines} lines, {ARCHITECTURE_LINES_MAX} allowed"));
    }
    for (index, line) in text.lines().enumerate() {
        for name in file_names(line).filter(|name| !tree.has(name)) {
            violations.push(format!("ARCHITECTURE.md:{}: {name} does not exist", index + 1));
        }
    }
    violations
}

/// The words of a line of prose that can only mean a file of this tree.
fn file_names(line: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-./:".contains(c);
    line.split(move |c| !is_part(c)).filter_map(|word| {
        let word = word.trim_end_matches(['.', ':', '/']);
        let elsewhere = word.starts_with('/') || word.contains(':') || word.contains("..");
        let by_ending = [".rs", ".toml", ".md"].iter().any(|end| {
            word.strip_suffix(end).is_some_and(|stem| !stem.is_empty() && !stem.ends_with('/'))
        });
        let by_folder = ["scripts/", "packaging/", ".ci/", "tests/tools/"]
            .iter()
            .any(|folder| word.starts_with(folder));
        (!elsewhere && (by_ending || by_folder)).then_some(word)
    })
}

fn violations(root: &Path) -> Vec<String> {
    let tree = Tree::load(root);
    RULES.iter().flat_map(|rule| rule(&tree)).collect()
}

/// Fails when any file of this checkout breaks any rule above.
#[test]
fn this_tree_follows_the_house_rules() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the root");
    let found = violations(root);
    assert!(found.is_empty(), "{} violations:\n{}", found.len(), found.join("\n"));
}

const LINTS: &str = "[lints]\nworkspace = true\n";

fn plant(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().expect("a file has a folder")).expect("folder is made");
    fs::write(path, text).expect("file is written");
}

/// A tree that follows every rule: three crates, a scenario, an architecture.
fn plant_good_tree() -> TempDir {
    let folder = TempDir::new().expect("temporary folder is made");
    let root = folder.path();
    let members = r#"members = ["wal", "blockd", "tests"]"#;
    plant(root, "Cargo.toml", &format!("[workspace]\n{members}\n"));
    plant(root, "clippy.toml", "");
    plant(root, "wal/Cargo.toml", &format!("{LINTS}[package]\nname = \"wal\"\n"));
    plant(root, "wal/src/lib.rs", "//! The log, which may hold unsafe code.\n");
    let imports_wal = "[dependencies]\nwal.workspace = true\n";
    let package = |name: &str| format!("{LINTS}{imports_wal}[package]\nname = \"{name}\"\n");
    plant(root, "blockd/Cargo.toml", &package("blockd"));
    plant(root, "blockd/src/main.rs", "#![forbid(unsafe_code)]\n//! The daemon.\n");
    let scenarios = "[[test]]\npath = \"scenarios/main.rs\"\n";
    plant(root, "tests/Cargo.toml", &format!("{}{scenarios}", package("blockd-tests")));
    plant(root, "tests/scenarios/main.rs", "//! All.\n#![forbid(unsafe_code)]\nmod crash;\n");
    plant(root, "tests/scenarios/crash.rs", "//! Crashes.\n");
    plant(root, "scripts/test", "");
    let architecture = "`scripts/test`, crash.rs and [docs](https://x.org/a.md), /etc/a.toml.\n";
    plant(root, "ARCHITECTURE.md", architecture);
    plant(root, "target/release/build/generated.rs", "fn undocumented() {}\n");
    folder
}

/// Puts one file into an otherwise good tree and expects exactly one complaint.
#[track_caller]
fn check(path: &str, text: &str, complaint: &str) {
    let folder = plant_good_tree();
    plant(folder.path(), path, text);
    assert_eq!(violations(folder.path()), [complaint], "after writing {path}");
}

/// Fails when a rule complains about what it should let pass.
#[test]
fn a_tree_that_follows_the_rules_passes() {
    assert_eq!(violations(plant_good_tree().path()), [""; 0]);
}

/// Fails when a crate could import against the agreed direction unnoticed.
#[test]
fn an_import_against_the_direction_is_found() {
    let imports =
        |name: &str, table: &str| format!("{LINTS}[package]\nname = \"{name}\"\n{table}\n");
    let expected = "wal/Cargo.toml: wal must not import blockd";
    for table in [
        "[dependencies]\nblockd.workspace = true",
        "[dev-dependencies]\nblockd = { path = \"../blockd\" }",
        "[build-dependencies]\nalias = { path = \"../blockd\", package = \"blockd\" }",
        "[target.'cfg(unix)'.dependencies]\nblockd.workspace = true",
    ] {
        check("wal/Cargo.toml", &imports("wal", table), expected);
    }
    let tests = "[dependencies]\nblockd-tests.workspace = true";
    let expected = "blockd/Cargo.toml: blockd must not import blockd-tests";
    check("blockd/Cargo.toml", &imports("blockd", tests), expected);
}

/// Fails when a crate could stand outside the workspace or its lints unnoticed.
#[test]
fn a_crate_without_the_shared_lints_is_found() {
    let bare = "[package]\nname = \"wal\"\n";
    check("wal/Cargo.toml", bare, "wal/Cargo.toml: lacks `[lints] workspace = true`");
    let stranger = format!("{LINTS}[package]\nname = \"more\"\n");
    check("bench/Cargo.toml", &stranger, "bench/Cargo.toml: not a member of the workspace");
    let complaint = "wal/clippy.toml: clippy takes the nearest one and would drop the root's";
    check("wal/clippy.toml", "", complaint);
}

/// Fails when a source file could be too long, silent or unsafe unnoticed.
#[test]
fn a_source_file_against_the_rules_is_found() {
    let long = format!("//! Long.\n{}", "\n".repeat(SOURCE_LINES_MAX));
    check("wal/src/long.rs", &long, "wal/src/long.rs: 601 lines, 600 are allowed");
    for silent in ["", "use std::fs;\n", "// A comment.\n", "//!\n"] {
        check("wal/src/a.rs", silent, "wal/src/a.rs: does not open with `//!`");
    }
    let complaint = "blockd/src/main.rs: lacks `#![forbid(unsafe_code)]`";
    check("blockd/src/main.rs", "//! The daemon.\n", complaint);
    let complaint = "tests/scenarios/main.rs: lacks `#![forbid(unsafe_code)]`";
    check("tests/scenarios/main.rs", "//! All.\nmod crash;\n", complaint);
}

/// Fails when unfinished or forgotten code could go in unnoticed.
#[test]
fn unfinished_and_forgotten_code_is_found() {
    for (head, tail) in [("to", "do!("), ("unimple", "mented!("), ("#[ign", "ore"), ("FIX", "ME")] {
        let complaint = format!("wal/src/a.rs:2: {head}{tail} is unfinished work");
        check("wal/src/a.rs", &format!("//! A file.\n    {head}{tail}"), &complaint);
    }
    let complaint = "tests/scenarios/lost.rs: tests/scenarios/main.rs does not name it";
    check("tests/scenarios/lost.rs", "//! Never run.\n", complaint);
}

/// Fails when the documents could drift from the tree, or the tree from the agreed one, unnoticed.
#[test]
fn a_document_that_names_a_missing_file_is_found() {
    let missing = |name: &str| format!("ARCHITECTURE.md:1: {name} does not exist");
    for (text, name) in [
        ("see `wal/src/gone.rs`.", "wal/src/gone.rs"),
        ("see [it](GONE.md)", "GONE.md"),
        ("run scripts/gone.", "scripts/gone"),
    ] {
        check("ARCHITECTURE.md", text, &missing(name));
    }
    let long = "\n".repeat(ARCHITECTURE_LINES_MAX + 1);
    check("ARCHITECTURE.md", &long, "ARCHITECTURE.md: 301 lines, 300 allowed");
    check("notes/plan.txt", "", "notes: not part of the agreed top level");
}
