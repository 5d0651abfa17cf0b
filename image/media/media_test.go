package media

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"debug/pe"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem"
	"github.com/diskfs/go-diskfs/filesystem/fat32"
	"github.com/diskfs/go-diskfs/filesystem/iso9660"
	"github.com/diskfs/go-diskfs/partition/gpt"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/loader"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

func options(t *testing.T) Options {
	t.Helper()
	dir := t.TempDir()
	o := Options{
		Loader:  loader.Loader{Stub: uki.Stub(t, 1024), BIOS: bytes.Repeat([]byte("grub"), 4000), BootHybrid: bytes.Repeat([]byte{0x90}, 512)},
		Version: "v1.2.3", Release: "6.12.0-amd64", Args: []string{"console=ttyS1"},
		Kernel: filepath.Join(dir, "vmlinuz"), Initramfs: filepath.Join(dir, "initramfs"), Program: filepath.Join(dir, "program"),
	}
	o.Loader.Disk = dir
	for path, content := range map[string]string{
		o.Kernel: string(uki.Linux("6.12.0-amd64")), o.Initramfs: strings.Repeat("the initramfs ", 100000), filepath.Join(dir, esp.SystemdBoot): "systemd-boot", o.Program: "program",
		filepath.Join(dir, esp.GRUBRecord): strings.Repeat("r", 512), filepath.Join(dir, esp.GRUBProgram): strings.Repeat("p", 2048),
	} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return o
}

func build(t *testing.T, o Options, kind string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "medium")
	if err := o.Build(t.Context(), kind, to); err != nil {
		t.Fatal(err)
	}
	return to
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// hardening is what each command line begins with.
const hardening = "slab_nomerge init_on_alloc=1 page_alloc.shuffle=1 randomize_kstack_offset=on vsyscall=none proc_mem.force_override=never lockdown=integrity"

// Who sets a hardening argument otherwise has it once only: the kernel can't take back each of them.
func TestHardeningYields(t *testing.T) {
	o := options(t)
	o.Args = []string{"lockdown=none", "init-on-alloc=0"}
	const rest = "slab_nomerge page_alloc.shuffle=1 randomize_kstack_offset=on vsyscall=none proc_mem.force_override=never"
	want := rest + " " + defaultArgs + " lockdown=none init-on-alloc=0"
	if got := o.cmdline(); got != want {
		t.Errorf("%q", got)
	}
	customized := Options{Cmdline: hardening + " " + defaultArgs, Args: o.Args}
	if got := customized.cmdline(); got != want {
		t.Errorf("customized: %q", got)
	}
	if got := strings.Join(Hardening(o.Args...), " "); got != rest {
		t.Errorf("%q", got)
	}
	if got := (Options{Cmdline: "quiet", Args: []string{"a"}}).cmdline(); got != "quiet a" {
		t.Errorf("of a former release: %q", got)
	}
}

func TestUnifiedKernelImage(t *testing.T) {
	o := options(t)
	made := read(t, build(t, o, UKI))
	file, err := pe.NewFile(bytes.NewReader(made))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		".linux": string(uki.Linux("6.12.0-amd64")), ".initrd": string(read(t, o.Initramfs)), ".uname": o.Release,
		".cmdline": hardening + " console=ttyS0,115200 console=tty0 quiet panic=10 console=ttyS1",
		".osrel":   "ID=\"garboard\"\nNAME=\"Garboard\"\nPRETTY_NAME=\"Garboard v1.2.3\"\nVERSION_ID=\"v1.2.3\"\n",
	} {
		s := file.Section(name)
		if s == nil {
			t.Errorf("there is no section %s", name)
			continue
		}
		content, err := s.Data()
		if err != nil || string(content[:s.VirtualSize]) != want {
			t.Errorf("%s is %.100q: %v", name, content, err)
		}
		if s.VirtualAddress%4096 != 0 || s.Offset%512 != 0 {
			t.Errorf("%s is at %x in memory, and at %x in the file", name, s.VirtualAddress, s.Offset)
		}
	}
	image, err := esp.ReadImage(bytes.NewReader(made), int64(len(made)))
	if err != nil || image.Version != o.Version || !strings.HasSuffix(image.Cmdline, "console=ttyS1") {
		t.Errorf("%+v, %v", image, err)
	}
	for list, want := range map[string]string{image.Kernel: string(uki.Linux("6.12.0-amd64")), image.Initramfs: string(read(t, o.Initramfs))} {
		var first, count int
		if _, err := fmt.Sscanf(list, "%d+%d", &first, &count); err != nil || !strings.HasPrefix(string(made[first*512:(first+count)*512]), want) {
			t.Errorf("%.10q isn't in the blocks %s: %v", want, list, err)
		}
	}
	end := file.Sections[len(file.Sections)-1]
	if size := file.OptionalHeader.(*pe.OptionalHeader64).SizeOfImage; size < end.VirtualAddress+end.VirtualSize {
		t.Errorf("the image ends at %x, and its last section at %x", size, end.VirtualAddress+end.VirtualSize)
	}
	if _, err := unified(uki.Stub(t, 512), make([]section, 8)); err == nil {
		t.Error("headers without room have got 8 sections")
	}
	if _, err := unified([]byte("no program"), nil); err == nil {
		t.Error("a text is a boot stub")
	}
}

// A crafted installer image doesn't end the program that builds from it.
func TestBootLoadersOfAnInstallerImage(t *testing.T) {
	t.Parallel()
	const optional = 0x40 + signatureSize + 20
	for name, change := range map[string]func(stub []byte) []byte{
		"no MZ": func(stub []byte) []byte { return append(stub[0x40+signatureSize:], bytes.Repeat([]byte{0xff}, 512)...) },
		"large headers": func(stub []byte) []byte {
			stub[optional+62] = 0xff
			return stub[:0x40+signatureSize+20+240+sectionHeaderSize]
		},
		"no alignment":      func(stub []byte) []byte { stub[optional+37] = 0; return stub },
		"large alignment":   func(stub []byte) []byte { stub[optional+39] = 0xff; return stub },
		"no page alignment": func(stub []byte) []byte { stub[optional+33] = 0; return stub },
	} {
		if _, err := unified(change(uki.Stub(t, 1024)), make([]section, 5)); err == nil {
			t.Errorf("%s: it is a boot stub", name)
		}
	}
	if err := bootRecord(nil, loader.Loader{}, 0); err == nil {
		t.Error("nothing is a boot record")
	}
}

// The same parts give the same bytes, also in another time zone, and other ones give others.
func TestMediaAreReproducible(t *testing.T) {
	o := options(t)
	for _, kind := range Kinds {
		first := sum(t, build(t, o, kind))
		here := time.Local
		time.Local = time.FixedZone("elsewhere", 20700) // 5 h 45 min
		second := sum(t, build(t, o, kind))
		time.Local = here
		if first != second {
			t.Errorf("two builds of %s differ", kind)
		}
		other := o
		other.Args = []string{"console=ttyS2"}
		if first == sum(t, build(t, other, kind)) {
			t.Errorf("%s with another argument is the same", kind)
		}
	}
}

// sum is that of a medium: of a file, or of the names and the content of a directory.
func sum(t *testing.T, path string) [sha256.Size]byte {
	t.Helper()
	all := sha256.New()
	if err := filepath.WalkDir(path, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		fmt.Fprintf(all, "%q %x\n", strings.TrimPrefix(name, path), sha256.Sum256(read(t, name)))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return [sha256.Size]byte(all.Sum(nil))
}

// What firmware and node look for is in the ISO: the partition and the files.
func TestISO(t *testing.T) {
	o := options(t)
	o.Config = []byte("machine: {}\n")
	path := build(t, o, ISO)
	image, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	iso, err := iso9660.Read(file.New(image, true), 0, 0, isoSector)
	if err != nil {
		t.Fatal(err)
	}
	if label := strings.TrimSpace(iso.Label()); label != boot.ISOLabel {
		t.Errorf("the volume is %q", label)
	}
	if second := read(t, path)[(firstDescriptor+1)*isoSector:]; string(second[:30]) != "\x00CD001\x01EL TORITO SPECIFICATION" {
		t.Errorf("the second volume descriptor isn't the boot record: %q", second[:30])
	}
	table, err := gpt.Read(image, diskSector, diskSector)
	if err != nil {
		t.Fatal(err)
	}
	if len(table.Partitions) == 0 || table.Partitions[0].Type != gpt.EFISystemPartition {
		t.Fatalf("partitions %v", table.Partitions)
	}
	efi := table.Partitions[0]
	fat, err := fat32.Read(file.New(image, true), int64(efi.Size), int64(efi.Start)*diskSector, diskSector)
	if err != nil {
		t.Fatal(err)
	}
	uki := content(t, fat, BootFile)
	if !bytes.Equal(uki, read(t, build(t, withISOArgument(o), UKI))) {
		t.Error("UEFI would boot another unified kernel image")
	}
	var described esp.Medium
	if err := json.Unmarshal(content(t, iso, "/"+esp.MediumFile), &described); err != nil || described.Version != o.Version || !slices.Equal(described.Images, []string{config.DefaultPauseImage}) {
		t.Errorf("%+v, %v", described, err)
	}
	if got := content(t, iso, "/"+described.File)[described.Offset:][:described.Size]; !bytes.Equal(got, uki) {
		t.Error("the system that is installed is another one")
	}
	if got, sum := content(t, iso, "/"+boot.ISOFile), content(t, iso, "/"+boot.ISOSum); !bytes.Equal(got, o.Config) || string(sum) != fmt.Sprintf("%x  config.yaml\n", sha256.Sum256(o.Config)) {
		t.Errorf("the configuration is %q, and its checksum %q", got, sum)
	}
	if record := read(t, path)[:512]; !bytes.Equal(record[:recordAddress], o.Loader.BootHybrid[:recordAddress]) || record[446+16] != 0x80 {
		t.Errorf("boot record % x", record)
	}
}

// withISOArgument are the options of the unified kernel image in an ISO with a configuration.
func withISOArgument(o Options) Options {
	o.Config, o.Args = nil, append(o.Args, boot.ISOArgument)
	return o
}

func content(t *testing.T, fs filesystem.FileSystem, path string) []byte {
	t.Helper()
	f, err := fs.OpenFile(path, os.O_RDONLY)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestGRUBReplacesNothing(t *testing.T) {
	o := options(t)
	o.Args = []string{"garboard.config=http://10.0.0.1/${mac}.yaml?a&b", "it's"}
	uki, err := o.uki()
	if err != nil {
		t.Fatal(err)
	}
	script, err := o.grub(uki)
	if want := `quiet panic=10 'garboard.config=http://10.0.0.1/${mac}.yaml?a&b' 'it'\''s'` + "\n"; err != nil || !strings.Contains(script, want) {
		t.Errorf("%v, no %s in\n%s", err, want, script)
	}
}

func TestPXE(t *testing.T) {
	o := options(t)
	dir := build(t, o, PXE)
	want := "#!ipxe\nkernel vmlinuz " + hardening + " console=ttyS0,115200 console=tty0 quiet panic=10 console=ttyS1 initrd=initramfs\ninitrd initramfs\nboot\n"
	if got := string(read(t, filepath.Join(dir, ScriptFile))); got != want {
		t.Errorf("script\n%s", got)
	}
	for name, from := range map[string]string{KernelFile: o.Kernel, InitramfsFile: o.Initramfs} {
		if !bytes.Equal(read(t, filepath.Join(dir, name)), read(t, from)) {
			t.Errorf("%s differs", name)
		}
	}
	addArgs(t, dir)
	o.Config = []byte("machine: {}\n")
	if err := o.Build(t.Context(), PXE, dir); err == nil || !strings.Contains(err.Error(), "garboard.config=URL") {
		t.Errorf("PXE with a configuration: %v", err)
	}
}

// addArgs adds arguments to existing files. The unified kernel image and the script have them, and nothing else
// changes.
func addArgs(t *testing.T, dir string) {
	t.Helper()
	files, err := ReadNetworkFiles(dir)
	if err != nil {
		t.Fatal(err)
	}
	before := files[UKIFile]
	if err := files.AddArgs("a=1", "garboard.config=http://h/${serial}?m=${mac}&u=${uuid}"); err != nil {
		t.Fatal(err)
	}
	const cmdline = hardening + " console=ttyS0,115200 console=tty0 quiet panic=10 console=ttyS1 a=1 garboard.config=http://h/"
	if want := "#!ipxe\nkernel vmlinuz " + cmdline + "${serial:uristring}?m=${netX/mac}&u=${uuid} initrd=initramfs\ninitrd initramfs\nboot\n"; string(files[ScriptFile]) != want {
		t.Errorf("script\n%s", files[ScriptFile])
	}
	image, err := pe.NewFile(bytes.NewReader(files[UKIFile]))
	if err != nil {
		t.Fatal(err)
	}
	old, err := pe.NewFile(bytes.NewReader(before))
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range image.Sections {
		content, err := s.Data()
		if err != nil {
			t.Fatal(err)
		}
		if s.Name == ".cmdline" {
			if want := cmdline + "${serial}?m=${mac}&u=${uuid}"; string(content[:s.VirtualSize]) != want {
				t.Errorf("command line %q", content[:s.VirtualSize])
			}
		} else if was, err := old.Sections[i].Data(); err != nil || !bytes.Equal(was, content) || s.SectionHeader != old.Sections[i].SectionHeader {
			t.Errorf("section %s differs: %v", s.Name, err)
		}
	}
	if err := files.AddArgs(strings.Repeat("x", maxCmdline)); err == nil || !strings.Contains(err.Error(), "has room for a command line of 2048 characters") {
		t.Errorf("a long command line: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, IPXEFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadNetworkFiles(dir); err == nil || !strings.Contains(err.Error(), "make the files with 'gbctl media build pxe -O "+dir+"'") {
		t.Errorf("without %s: %v", IPXEFile, err)
	}
}

// The image has the system, and says where it is.
func TestInstallerImage(t *testing.T) {
	o := options(t)
	archive := read(t, build(t, o, InstallerKind))
	image, err := tarball(t, archive)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil || !slices.Equal(config.Config.OnBuild, onBuild) || config.Config.Labels[esp.InstallerLabel] != o.Version {
		t.Errorf("%+v, %v", config, err)
	}
	content := mutate.Extract(image)
	defer content.Close()
	files := untar(t, content)
	var m esp.Medium
	if err := json.Unmarshal(files["usr/install/garboard.json"], &m); err != nil {
		t.Fatal(err)
	}
	uki := files["usr/install/"+m.File]
	if m.Version != o.Version || m.Offset != 0 || m.Size != int64(len(uki)) || m.SHA256 != fmt.Sprintf("%x", sha256.Sum256(uki)) || !bytes.Equal(uki, read(t, build(t, o, UKI))) {
		t.Errorf("%+v, of %d bytes", m, len(uki))
	}
	if string(files["usr/install/installer"]) != "program" {
		t.Error("the image doesn't have the program that customizes it")
	}
}

// The directory has all that media are made of.
func TestInstallerDirectory(t *testing.T) {
	o, dir, work := options(t), t.TempDir(), t.TempDir()
	o.From, o.PodImages = "v0.0.9", []string{"registry.example/pause:1"}
	if err := o.Directory(dir); err != nil {
		t.Fatal(err)
	}
	i, err := ReadInstaller(dir)
	if err != nil {
		t.Fatal(err)
	}
	again, err := i.Options(dir, work)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(again.PodImages, o.PodImages) {
		t.Errorf("the system runs pods with %q, want %q", again.PodImages, o.PodImages)
	}
	if i.From != o.From || again.From != o.From {
		t.Errorf("the system can be upgraded from %q, and another one that is made of it from %q", i.From, again.From)
	}
	for _, kind := range []string{ISO, UKI, Disk} {
		if !bytes.Equal(read(t, build(t, again, kind)), read(t, build(t, o, kind))) {
			t.Errorf("another %s is made of the directory", kind)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, KernelFile), uki.Linux("6.13.0-other"), 0o600); err != nil {
		t.Fatal(err)
	}
	if i, err = ReadInstaller(dir); err != nil || i.Replacement == nil {
		t.Errorf("another kernel isn't seen: %v", err)
	}
	if _, err := i.Options(dir, work); err == nil {
		t.Error("a medium would have the former kernel")
	}
	image := read(t, filepath.Join(dir, UKIFile))
	image[len(image)/2] ^= 1
	if err := os.WriteFile(filepath.Join(dir, UKIFile), image, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadInstaller(dir); err == nil || !strings.Contains(err.Error(), "garboard.efi has the SHA-256") {
		t.Errorf("a damaged system: %v", err)
	}
}

// tarball is the image in an archive, as a registry gets it.
func tarball(t *testing.T, archive []byte) (v1.Image, error) {
	t.Helper()
	dir := t.TempDir()
	for name, data := range untar(t, bytes.NewReader(archive)) {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return nil, err
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			return nil, err
		}
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, err
	}
	if err := validate.Index(index, validate.Fast); err != nil {
		return nil, err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	return index.Image(manifest.Manifests[0].Digest)
}

// untar returns the files of an archive.
func untar(t *testing.T, from io.Reader) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for archive := tar.NewReader(from); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if header.Typeflag != tar.TypeReg {
			continue
		}
		if files[header.Name], err = io.ReadAll(archive); err != nil {
			t.Fatal(err)
		}
	}
}

// An image is tagged with the release, which a gbctl of another build knows, too.
func TestInstallerImageIsTagged(t *testing.T) {
	t.Parallel()
	for version, tag := range map[string]string{
		"v1.2.3": "v1.2.3", "v1.2.3+20261130.abc": "v1.2.3", "v1.2.3-rc.1+20261130.abc": "v1.2.3-rc.1", "v1.2.3-dev+20261130.abc-dirty.1": "v1.2.3-dev",
	} {
		if got := InstallerImage(version); got != "ghcr.io/garboard-os/installer:"+tag {
			t.Errorf("%s: %s", version, got)
		}
	}
}
