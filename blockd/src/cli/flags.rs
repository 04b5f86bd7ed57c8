//! The settings as flags of `serve`, made from the one list of settings.

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

use crate::config::Flags;
use crate::config::settings::{SECTIONS, Setting, all};

/// The settings that were given on the command line. `--control` is not among them: it is an option
/// of every command.
#[derive(Debug, Clone, Default)]
pub struct SettingFlags(pub Flags);

const COMMON: &str = "control";

impl Args for SettingFlags {
    fn augment_args(command: Command) -> Command {
        SECTIONS.iter().fold(command, |command, section| {
            let settings = section.settings.iter().filter(|setting| setting.name != COMMON);
            command.args(settings.map(|setting| flag(setting).help_heading(section.title)))
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn flag(setting: &'static Setting) -> Arg {
    let help =
        format!("{} [env: {}] [default: {}]", setting.help, setting.variable(), setting.default);
    let flag = Arg::new(setting.name).long(setting.name).value_name(setting.placeholder).help(help);
    match setting.placeholder {
        "BOOL" => flag.num_args(0..=1).require_equals(true).default_missing_value("true"),
        _ => flag,
    }
}

impl FromArgMatches for SettingFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for setting in all().filter(|setting| setting.name != COMMON) {
            if let Some(text) = matches.get_one::<String>(setting.name) {
                self.0.insert(setting.name, text.clone());
            }
        }
        Ok(())
    }
}
