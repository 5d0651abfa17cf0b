package media

import (
	"bytes"
	"crypto/ed25519"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem"
	"github.com/diskfs/go-diskfs/filesystem/iso9660"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/signed"
	"github.com/garboard-os/garboard/tools/testing/signer"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

// whole are options of a system with a program.
func whole(t *testing.T) Options {
	t.Helper()
	o := options(t)
	system, err := ReadSystem(uki.Image(t, o.Version, "quiet"))
	if err == nil {
		err = os.WriteFile(o.Initramfs, system.Initramfs, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// judged are what lies beside the system of each kind of medium.
func judged(t *testing.T, o Options, kinds ...string) (all []signed.Files) {
	t.Helper()
	for _, kind := range kinds {
		made, files := build(t, o, kind), fstest.MapFS{}
		var dir fs.FS = files
		switch kind {
		case PXE:
			dir = os.DirFS(made)
		case InstallerKind:
			image, err := tarball(t, read(t, made))
			if err != nil {
				t.Fatal(err)
			}
			content := mutate.Extract(image)
			defer content.Close()
			for name, data := range untar(t, content) {
				files[strings.TrimPrefix(name, esp.InstallDir+"/")] = &fstest.MapFile{Data: data}
			}
		case ISO:
			iso := openISO(t, made)
			for _, name := range []string{esp.MediumFile, signed.StatementFile, signed.SignatureFile} {
				if f, err := iso.OpenFile("/"+name, os.O_RDONLY); err == nil {
					f.Close()
					files[name] = &fstest.MapFile{Data: content(t, iso, "/"+name)}
				}
			}
		}
		f, err := signed.Read(dir)
		if err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		all = append(all, f)
	}
	return all
}

func trusts(t *testing.T, maker string) signed.Policy {
	t.Helper()
	return signed.Policy{Keys: []ed25519.PublicKey{signer.Key(maker).Public().(ed25519.PublicKey)}}
}

// A build signs the system once for all media. What is made of its installer image keeps the signature until the system
// is another one.
func TestMediaAreSigned(t *testing.T) {
	o, dir, work := whole(t), t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, ProgramFile), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := o.Directory(dir); err != nil {
		t.Fatal(err)
	}
	for _, f := range judged(t, o, ISO, InstallerKind, PXE) {
		if _, _, err := trusts(t, signer.Release).Judge(f); err == nil || !strings.Contains(err.Error(), "isn't signed") {
			t.Errorf("without a key: %v", err)
		}
	}
	o.Key = signer.Key(signer.Release)
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
	made := append(judged(t, o, ISO, InstallerKind, PXE), judged(t, again, ISO, InstallerKind, PXE)...)
	for _, f := range made {
		m, unsigned, err := trusts(t, signer.Release).Judge(f)
		if err != nil || unsigned != "" || m.Version != o.Version || m.Archive != hash(read(t, o.Initramfs)) || m.Kernel != hash(read(t, o.Kernel)) || m.SHA256 != i.SHA256 {
			t.Errorf("%+v, %s, %v", m, unsigned, err)
		}
		if !bytes.Equal(f.Statement, made[0].Statement) || !bytes.Equal(f.Signature, made[0].Signature) {
			t.Errorf("another statement for the same system: %s", f.Statement)
		}
	}
	for name, change := range map[string]func(o *Options){
		"an argument":     func(o *Options) { o.Args = []string{"init=/evil"} },
		"a configuration": func(o *Options) { o.Config = []byte("version: v1alpha1\n") },
		"another version": func(o *Options) { o.Version = "v1.2.4" },
	} {
		changed := again
		change(&changed)
		if f := judged(t, changed, ISO)[0]; f.Statement != nil || f.Signature != nil {
			t.Errorf("%s: the system is another one, and has the signature of the former one", name)
		}
		changed.Key = signer.Key("the owner")
		if _, _, err := trusts(t, "the owner").Judge(judged(t, changed, ISO)[0]); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	// An installer directory whose system is changed doesn't keep what was signed.
	again.Args = []string{"quiet"}
	if err := again.Directory(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, signed.SignatureFile)); err == nil {
		t.Error("the signature of the former system is kept")
	}
}

func openISO(t *testing.T, path string) filesystem.FileSystem {
	t.Helper()
	image, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { image.Close() })
	iso, err := iso9660.Read(file.New(image, true), 0, 0, isoSector)
	if err != nil {
		t.Fatal(err)
	}
	return iso
}
