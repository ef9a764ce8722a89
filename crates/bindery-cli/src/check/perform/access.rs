//! Actions of programs: loads, stores, fetches, `fork`.

use bindery::Operation;
use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery_hosted::{Program, Walk};

use super::{MOST_BYTES, ended};
use crate::check::failure::Failure;
use crate::check::fixture::{Fixture, Stop};
use crate::check::mistake::Mistake;
use crate::check::number::Value;
use crate::check::outcome::Outcome;
use crate::check::script::Access;
use crate::check::show;

impl<A: Walk> Fixture<'_, A> {
    pub(super) fn access(&self, index: usize, access: &Access) -> Result<(String, Outcome), Stop> {
        let program = Program::new(self.machine, &self.process(index).space);
        let (call, result) = match access {
            Access::Read { at, length: None } => {
                let at = self.number(at)?;
                let result = program.load(VirtAddr(at)).map(Outcome::hexadecimal);
                (format!("read({})", show::hexadecimal(at)), result)
            }
            Access::Read { at, length: Some(length) } => {
                let at = self.number(at)?;
                let mut bytes = self.buffer(length)?;
                let result = program.read(VirtAddr(at), &mut bytes);
                let call =
                    format!("read({}, {})", show::hexadecimal(at), show::size(bytes.len() as u64));
                (call, result.map(|()| Outcome::Bytes { value: None, bytes }))
            }
            Access::Write { at, values } => {
                let at = self.number(at)?;
                let (bytes, shown) = self.words(values)?;
                let result = program.write(VirtAddr(at), &bytes).map(|()| Outcome::Done);
                (format!("write({}, {shown})", show::hexadecimal(at)), result)
            }
            Access::Fetch { at } => {
                let at = self.number(at)?;
                let result = program.execute(VirtAddr(at)).map(|()| Outcome::Done);
                (format!("fetch({})", show::hexadecimal(at)), result)
            }
            Access::Fill { at, length, byte } => {
                let (at, length, byte) = (self.number(at)?, self.number(length)?, self.byte(byte)?);
                let result = program.fill(VirtAddr(at), length, byte).map(|()| Outcome::Done);
                let (shown, size) = (show::hexadecimal(at), show::size(length));
                (format!("fill({shown}, {size}, {byte:#04x})"), result)
            }
        };
        let outcome = result.unwrap_or_else(|fault| Outcome::Failure(Failure::of_fault(fault)));
        Ok((call, outcome))
    }

    /// A buffer of zeroes for a read.
    pub(super) fn buffer(&self, length: &Value) -> Result<Vec<u8>, Stop> {
        let bytes = self.number(length)?;
        if bytes > MOST_BYTES {
            let message = format!("{} are too many bytes for one read", show::size(bytes));
            let help = format!("read at most {} at once", show::size(MOST_BYTES));
            return Err(Mistake::new(length.place, message).help(help).into());
        }
        Ok(vec![0; bytes as usize])
    }

    /// Eight bytes for each of the values, and their text.
    pub(super) fn words(&self, values: &[Value]) -> Result<(Vec<u8>, String), Stop> {
        let values: Result<Vec<u64>, Stop> =
            values.iter().map(|value| self.number(value)).collect();
        let values = values?;
        let shown: Vec<String> = values.iter().map(|value| show::hexadecimal(*value)).collect();
        Ok((values.into_iter().flat_map(u64::to_ne_bytes).collect(), shown.join(", ")))
    }

    /// The vector that `mincore` has written.
    pub(super) fn residence(&self, index: usize, raw: [u64; 6]) -> Outcome {
        let [_, length, vector, ..] = raw;
        let pages = length.div_ceil(PAGE_SIZE).min(MOST_BYTES);
        let mut bytes = vec![0; pages as usize];
        match self.process(index).space.read_user(VirtAddr(vector), &mut bytes) {
            Ok(()) => Outcome::Bytes { value: Some(0), bytes },
            Err(_) => Outcome::decimal(0),
        }
    }

    pub(super) fn fork(&mut self, index: usize, child: &str, line: usize) -> (String, Outcome) {
        let parent = self.process(index);
        let outcome = match parent.space.fork() {
            Ok(space) => {
                let files = parent.files.clone();
                self.add_process(child, space, files);
                Outcome::Done
            }
            // As in `clone(2)`, any missing resource is reported as missing memory.
            Err(error) => Outcome::Failure(Failure::of_errno(error.errno(Operation::Mmap))),
        };
        if outcome != Outcome::Done {
            self.no_process(child, ended(line, &outcome));
        }
        (format!("fork({child})"), outcome)
    }
}
