//! The control channel: the kernel's reports to the host, separate from the output of programs.
//!
//! The channel is a file of lines that QEMU writes for the kernel:
//!
//! | line | meaning |
//! |---|---|
//! | `first-user-instruction NANOSECONDS` | the machine's clock at the start of the first program |
//! | `status NUMBER` | the first program's exit status; 128 and the signal that killed it |
//! | `panic TEXT` | the kernel panicked; further lines belong to the text |
//!
//! Any other line is a message of the kernel's log.

/// The kernel's reports to the host.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Report {
    /// The first program's exit status, from 0 to 255.
    pub status: Option<i32>,
    /// The machine's clock at the first instruction of the first program, in nanoseconds; if the
    /// clock counts instructions, the number of instructions.
    pub first_user_instruction: Option<u64>,
    /// The reason and place of a kernel panic.
    pub panic: Option<String>,
    /// Messages of the kernel's log.
    pub log: Vec<String>,
}

/// Reads the output of the channel. Replaces invalid UTF-8: the last words of a panicking kernel
/// matter.
pub fn read(bytes: &[u8]) -> Report {
    let mut report = Report::default();
    for line in String::from_utf8_lossy(bytes).lines() {
        report.take(line.trim_end());
    }
    report
}

impl Report {
    fn take(&mut self, line: &str) {
        if let Some(panic) = &mut self.panic {
            panic.push('\n');
            panic.push_str(line);
            return;
        }
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match (word, rest.parse::<u64>()) {
            ("status", Ok(status @ 0..=255)) => self.status = Some(status as i32),
            ("first-user-instruction", Ok(time)) => self.first_user_instruction = Some(time),
            ("panic", _) => {
                self.panic = Some(rest.to_owned());
                // An earlier status does not describe how the machine ended.
                self.status = None;
            }
            ("", _) => {}
            _ => self.log.push(line.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_good_run_reports_time_and_status() {
        let report = read(b"first-user-instruction 52000123\nstatus 3\n");
        assert_eq!(report.status, Some(3));
        assert_eq!(report.first_user_instruction, Some(52_000_123));
        assert_eq!((report.panic, report.log.len()), (None, 0));
    }

    #[test]
    fn all_lines_after_a_panic_belong_to_it() {
        let report = read(b"status 0\npanic a frame leaked\n  at check\nstatus 0\n");
        assert_eq!(report.panic.as_deref(), Some("a frame leaked\n  at check\nstatus 0"));
        assert_eq!(report.status, None, "a panic after the last program is no success");
    }

    #[test]
    fn lines_that_mean_nothing_are_log_messages() {
        let report = read(b"unknown call 451\n\nstatus 256\nstatus many\r\nstatus -1\n");
        let log = ["unknown call 451", "status 256", "status many", "status -1"];
        assert_eq!(report.log, log);
        assert_eq!(report.status, None);
    }

    #[test]
    fn a_truncated_channel_is_read_to_its_end() {
        assert_eq!(read(b"").status, None);
        assert_eq!(read(b"status 1").status, Some(1));
        assert_eq!(read(b"panic \xe2\x82").panic.as_deref(), Some("\u{fffd}"));
    }
}
