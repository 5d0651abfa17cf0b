// Package source is where a machine finds its configuration: a table of sources, which are read in
// their order.
//
//	STATE ─▶ garboard.config= ─▶ fw_cfg ─▶ SMBIOS ─▶ garboard.platform=
package source

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
)

const (
	// fwCfgFile is the file of the kernel's qemu_fw_cfg module for -fw_cfg
	// name=opt/dev.garboard/config,file=….
	fwCfgFile = "/sys/firmware/qemu_fw_cfg/by_name/opt/dev.garboard/config/raw"

	// oemStrings are the SMBIOS structures of type 11; there may be several
	// (DSP0134 §7.12). Their strings start after a byte with the count.
	oemStrings = "/sys/firmware/dmi/entries/11-*/raw"
)

// none is boot.ErrNone with the reason.
type none string

func (n none) Error() string      { return string(n) }
func (none) Is(target error) bool { return target == boot.ErrNone }

// State is the name of the source for a node that has had a configuration.
const State = "state"

// Source is a place where the configuration may be.
type Source struct {
	Name string
	// Read returns the document. An error that is boot.ErrNone means that this source
	// has none; any other error means that it has one, but can't be reached.
	Read func(context.Context) ([]byte, error)
}

// Options describe the machine that looks for its configuration.
type Options struct {
	Mode    boot.Mode
	Cmdline boot.Cmdline
	Root    fs.FS        // default: the root of the file system
	HTTP    *http.Client // default: http.DefaultClient
	Mount   boot.Mounter
	// Wait waits between two attempts.
	Wait Waiter
	// Metadata is the URL of the cloud's metadata service; default: linkLocal.
	Metadata string
}

func (o Options) withDefaults() Options {
	if o.Root == nil {
		o.Root = os.DirFS("/")
	}
	o.HTTP = cmp.Or(o.HTTP, http.DefaultClient)
	o.Metadata = cmp.Or(o.Metadata, linkLocal)
	return o
}

// All is the table of sources, in the order in which they are read.
func All(o Options) []Source {
	o = o.withDefaults()
	state := Source{State, func(context.Context) ([]byte, error) { return readFile(o.Root, boot.ConfigFile) }}
	if o.Mode == boot.Container {
		return []Source{
			state,
			{"seed", func(context.Context) ([]byte, error) {
				if _, err := fs.Stat(o.Root, strings.TrimPrefix(boot.ResetFile, "/")); !errors.Is(err, fs.ErrNotExist) {
					return nil, none("it was for the node before it was reset")
				}
				return readFile(o.Root, boot.SeedConfigFile)
			}},
		}
	}
	platform, _ := o.Cmdline.Get(boot.ParamPlatform)
	sources := []Source{
		state,
		{"kernel argument", func(ctx context.Context) ([]byte, error) {
			location, _ := o.Cmdline.Get(boot.ParamConfig)
			if location == "" {
				return nil, none(boot.ParamConfig + "= isn't given")
			}
			return o.readLocation(ctx, location)
		}},
		{"fw_cfg", func(context.Context) ([]byte, error) { return readFile(o.Root, fwCfgFile) }},
		{"SMBIOS", o.readSMBIOS},
	}
	if platform != "" && platform != platformMetal {
		sources = append(sources, Source{"platform " + platform, func(ctx context.Context) ([]byte, error) { return o.readPlatform(ctx, platform, userData) }})
	}
	return sources
}

// Found is the configuration and where it was.
type Found struct {
	Source string
	Data   []byte
}

// Find reads the sources in order. The first one with a configuration decides.
// If it can't be reached, no later source is used, because the machine would
// then run another configuration than its operator chose. The error is boot.ErrNone
// if all are empty, and has the error of each source. Source is the one that can't be reached.
func Find(ctx context.Context, sources []Source) (Found, error) {
	var errs []string
	for _, s := range sources {
		data, err := s.Read(ctx)
		switch {
		case err == nil:
			return Found{Source: s.Name, Data: data}, nil
		case !errors.Is(err, boot.ErrNone):
			return Found{Source: s.Name}, fmt.Errorf("read configuration from %s: %w", s.Name, err)
		}
		errs = append(errs, s.Name+": "+err.Error())
	}
	return Found{}, fmt.Errorf("%w: %s", boot.ErrNone, strings.Join(errs, "; "))
}

// readFile reads an absolute path below root, up to the size limit of a configuration.
func readFile(root fs.FS, name string) ([]byte, error) {
	f, err := root.Open(strings.TrimPrefix(name, "/"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, none("no " + name)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := readLimited(f)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return data, nil
}

var errTooLarge = fmt.Errorf("larger than the %d bytes that a configuration may have", config.MaxSize)

func readLimited(r io.Reader) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, config.MaxSize+1))
	if err == nil && len(data) > config.MaxSize {
		err = errTooLarge
	}
	return data, err
}

// readLocation reads the location in garboard.config=.
func (o Options) readLocation(ctx context.Context, location string) ([]byte, error) {
	switch {
	case location == boot.ISOLabel:
		return o.readVolume(ctx)
	case strings.HasPrefix(location, "http://"), strings.HasPrefix(location, "https://"):
		return fetch(ctx, o.HTTP, o.Wait, request{url: location, expand: o.expand})
	case strings.HasPrefix(location, boot.DataURL):
		_, text, _ := strings.Cut(location, "base64,")
		data, err := base64.StdEncoding.DecodeString(text)
		if err != nil || len(data) == 0 {
			return nil, errors.New("data: URL holds no base64")
		}
		return data, nil
	}
	return nil, fmt.Errorf("%s=%s is neither an http or https URL nor %s", boot.ParamConfig, location, boot.ISOLabel)
}

func (o Options) readVolume(ctx context.Context) (data []byte, err error) {
	err = o.Mount(ctx, boot.ISOLabel, func(files fs.FS) error {
		text, err := readFile(files, boot.ISOFile)
		if err != nil {
			return err
		}
		data = text // of the only volume that has it
		sum, err := readFile(files, boot.ISOSum)
		if errors.Is(err, boot.ErrNone) {
			return nil
		}
		if want, _, _ := strings.Cut(string(sum), " "); err == nil && strings.TrimSpace(want) != fmt.Sprintf("%x", sha256.Sum256(data)) {
			err = fmt.Errorf("%s isn't as %s beside it says: make the medium again, or correct the latter", boot.ISOFile, boot.ISOSum)
		}
		return err
	})
	// The operator asked for the volume: a missing one is a failure.
	if errors.Is(err, boot.ErrNone) {
		return nil, fmt.Errorf("volume labelled %s with %s: %v", boot.ISOLabel, boot.ISOFile, err)
	}
	return data, err
}

// readSMBIOS looks for an OEM string that is spelled like the kernel argument:
// garboard.config=URL, or garboard.config=data:;base64,… with the document.
func (o Options) readSMBIOS(ctx context.Context) ([]byte, error) {
	names, err := fs.Glob(o.Root, strings.TrimPrefix(oemStrings, "/"))
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	for _, name := range names {
		raw, err := readFile(o.Root, name)
		if err != nil {
			return nil, err
		}
		for _, s := range smbiosStrings(raw) {
			if location, ok := strings.CutPrefix(s, boot.ParamConfig+"="); ok {
				return o.readLocation(ctx, location)
			}
		}
	}
	return nil, none("no OEM string " + boot.ParamConfig + "= in " + path.Dir(path.Dir(oemStrings)))
}

// smbiosStrings is the strings of one structure. They follow its formatted
// part, whose length is in its second byte. A zero byte ends each string, and
// another one ends all (DSP0134 §6.1.3).
func smbiosStrings(raw []byte) (found []string) {
	if len(raw) < 2 || int(raw[1]) > len(raw) {
		return nil
	}
	for _, s := range bytes.Split(raw[raw[1]:], []byte{0}) {
		if len(s) == 0 {
			break
		}
		found = append(found, string(s))
	}
	return found
}
