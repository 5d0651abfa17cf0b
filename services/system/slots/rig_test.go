package slots

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/signed"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/disks"
	"github.com/garboard-os/garboard/services/system/install"
	"github.com/garboard-os/garboard/tools/testing/signer"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

// A rig is a machine that has its disk and its medium in files. The loaders are what they are on a node.
type rig struct {
	config    *config.Config // nil: none yet
	known     bool           // whether the machine had a STATE
	sealedFor string         // the PCR key of the system that was written last
	t         *testing.T
	dir       string
	// panicked and boots are what is known of the boots before.
	panicked string
	boots    []configuration.Boot
	from     string // garboard.config=
	// before is called before the EFI system partition is used, and before the medium is read.
	before func(what string) error
	// asked is the last that was asked for: volumes, or only media.
	asked string
}

func newMachine(t *testing.T) *rig {
	t.Helper()
	m := &rig{t: t, dir: t.TempDir(), before: func(string) error { return nil }}
	for _, dir := range []string{"efi", "medium", "loaders"} {
		if err := os.Mkdir(filepath.Join(m.dir, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	m.put("keys", signer.Public(t, signer.Release))
	m.put("lockdown", []byte("none [integrity] confidentiality\n"))
	m.put("disk", make([]byte, 2<<20))
	m.put("meta", make([]byte, 1<<20))
	m.put("loaders/"+esp.SystemdBoot, []byte("systemd-boot"))
	m.put("loaders/"+esp.GRUBRecord, make([]byte, 512))
	m.put("loaders/"+esp.GRUBProgram, bytes.Repeat([]byte("grub"), 1000))
	return m
}

func (m *rig) put(name string, content []byte) {
	m.t.Helper()
	if err := os.WriteFile(filepath.Join(m.dir, name), content, 0o600); err != nil {
		m.t.Fatal(err)
	}
}

// insert puts a medium into the machine.
func (m *rig) insert(version string) {
	m.t.Helper()
	image := uki.Image(m.t, version, "quiet "+boot.ISOArgument)
	m.lay(signer.Signed(m.t, signer.Release, esp.Medium{Version: version, File: "efi.img", Offset: 100}, image))
	m.put("medium/efi.img", append(make([]byte, 100), append(image, "more"...)...))
}

// beside are the files that lie beside a system.
var beside = []string{esp.MediumFile, signed.StatementFile, signed.SignatureFile}

// lay puts them onto the medium, in place of those that are there.
func (m *rig) lay(files map[string][]byte) {
	m.t.Helper()
	for _, name := range beside {
		must(m.t, boot.IgnoreMissing(os.RemoveAll(filepath.Join(m.dir, "medium", name))))
		if content, there := files[name]; there {
			m.put("medium/"+name, content)
		}
	}
}

func (m *rig) Known() bool { return m.known }

func (m *rig) SealFor(_ context.Context, key string) error {
	m.sealedFor = key
	return nil
}

func (m *rig) Measured() disks.Measured { return disks.Measured{} }

func (m *rig) SystemDisk() (disks.SystemDisk, error) {
	return disks.SystemDisk{
		Path: filepath.Join(m.dir, "disk"),
		Meta: disk.Partition{Path: filepath.Join(m.dir, "meta"), Size: 1 << 20},
		BIOS: disk.Partition{Start: 1 << 20, Size: 1 << 20}, Sector: 512,
		Layout: "EFI 512 MiB, BIOS 1 MiB",
	}, nil
}

func (m *rig) UseEFI(_ context.Context, use func(dir string) error) error {
	if err := m.before("efi"); err != nil {
		return err
	}
	return use(filepath.Join(m.dir, "efi"))
}

func (m *rig) Volume(_ context.Context, label string, use func(fs.FS) error) error {
	m.asked = "volumes"
	return m.medium(label, use)
}

func (m *rig) Media(_ context.Context, label string, use func(fs.FS) error) error {
	m.asked = "media"
	return m.medium(label, use)
}

func (m *rig) medium(label string, use func(fs.FS) error) error {
	if err := m.before("medium"); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(m.dir, "medium", esp.MediumFile)); err != nil || label != boot.MediumLabel {
		return boot.ErrNone
	}
	return use(os.DirFS(filepath.Join(m.dir, "medium")))
}

// run is the program of a system.
func (m *rig) run(ctx context.Context, program, in io.Reader, out io.Writer, slot *os.File) error {
	content, err := io.ReadAll(program)
	if err != nil {
		return err
	}
	if !strings.HasPrefix(string(content), uki.Program("")) {
		m.t.Errorf("%q is run", content)
	}
	if status := install.Main(ctx, in, out, slot); status != 0 {
		return fmt.Errorf("exit status %d", status)
	}
	return nil
}

// boot starts the machine from a slot; "": from its medium.
func (m *rig) boot(slot string) *Slots {
	m.t.Helper()
	s := m.started(slot)
	must(m.t, s.Begin(m.t.Context()))
	return s
}

// started has its disk, and nothing is read yet.
func (m *rig) started(slot string) *Slots {
	m.t.Helper()
	line := "quiet garboard.platform=metal garboard.config=http://10.0.0.1/a"
	if m.from != "" {
		line = "quiet garboard.platform=metal garboard.config=" + m.from
	}
	if slot != "" {
		line += " garboard.slot=" + slot
	}
	store := resource.NewStore()
	if m.config != nil {
		must(m.t, configuration.Configs.Put(store.As(configuration.ID), configuration.ConfigID, m.config))
	}
	for i, b := range m.boots {
		must(m.t, configuration.Boots.Put(store.As(configuration.ID), fmt.Sprintf("%06d", i+1), b))
	}
	panicked := func() string { return m.panicked }
	return New(Options{Cmdline: boot.ParseCmdline(line), Store: store, Disks: m, Images: m, Panicked: panicked, Log: slog.New(slog.DiscardHandler), loaders: filepath.Join(m.dir, "loaders"), firmware: filepath.Join(m.dir, "firmware"), keys: filepath.Join(m.dir, "keys"), lockdown: filepath.Join(m.dir, "lockdown"), run: m.run})
}

// write writes the medium's system to the slot that doesn't run.
func (m *rig) write(s *Slots) error {
	m.t.Helper()
	src, err := s.Medium(m.t.Context(), false)
	if err != nil {
		return err
	}
	if err := s.Verify(m.t.Context(), src, nil); err != nil {
		return err
	}
	all, err := s.Get()
	if err != nil {
		return err
	}
	return s.Write(m.t.Context(), all.Target(s.Running()), src, boot.Slot{Args: []string{"mine=1"}}, func(int64, int64) {})
}

func (m *rig) want(s *Slots, want string) {
	m.t.Helper()
	var got []string
	for _, name := range boot.SlotNames {
		status, err := Statuses.Get(s.o.Store, name)
		if err != nil {
			m.t.Fatal(err)
		}
		text := name + " " + string(status.Spec.State) + " " + status.Spec.Version
		if status.Spec.Next {
			text += " next"
		}
		got = append(got, strings.TrimSpace(strings.ReplaceAll(text, "  ", " ")))
	}
	if diff := cmp.Diff(want, strings.Join(got, ", ")); diff != "" {
		m.t.Error(diff)
	}
}

func (m *rig) entries() string {
	m.t.Helper()
	found, err := filepath.Glob(filepath.Join(m.dir, "efi/loader/entries/*"))
	if err != nil {
		m.t.Fatal(err)
	}
	var names []string
	for _, path := range found {
		names = append(names, filepath.Base(path))
	}
	return strings.Join(names, " ")
}

// Fetch pulls an image, whose files are those of the medium.
func (m *rig) Fetch(_ context.Context, ref string, report func(done, of int64)) error {
	if ref == "missing" {
		return errors.New("not found")
	}
	report(1, 1)
	return os.Mkdir(filepath.Join(m.dir, ref), 0o700)
}

func (m *rig) Files(_ context.Context, ref string, use func(fs.FS) error) error {
	if _, err := os.Stat(filepath.Join(m.dir, ref)); err != nil {
		return err
	}
	files := fstest.MapFS{}
	for _, name := range append([]string{"efi.img", esp.KernelFile}, beside...) {
		data, err := os.ReadFile(filepath.Join(m.dir, "medium", name))
		if err == nil {
			files[esp.InstallDir+"/"+name] = &fstest.MapFile{Data: data}
		}
	}
	return use(files)
}

func (m *rig) Forget(context.Context) error {
	return os.Remove(filepath.Join(m.dir, "installer"))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
