package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/image/customize"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/image/sbom"
	"github.com/garboard-os/garboard/image/secureboot"
	"github.com/garboard-os/garboard/tools/gbctl/imagebundle"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func (a *app) imageCommand() *cobra.Command {
	return group("image", a.imageBuildCommand(), a.imageProvenanceCommand())
}

// pullFrom is the usage of --registry-mirror where gbctl pulls images.
const pullFrom = "pull the images of the registry HOST from URL; '*' is every registry without a mirror of its own"

// imageBuild are the flags of image build.
type imageBuild struct {
	from, modules, firmware, key string
	overlays, outputs            []string
	mirrors                      map[string][]string
	change                       customize.Change
	sign                         string
	mediaParts
}

func (a *app) imageBuildCommand() *cobra.Command {
	var b imageBuild
	cmd := command("build", func(cmd *cobra.Command, _ []string) error {
		outputs, err := parseOutputs(b.outputs)
		if err != nil {
			return err
		}
		if b.from == "" {
			return usagef("--from: name the installer image to build from, or a file of 'gbctl media build installer'")
		}
		carries := slices.ContainsFunc(outputs, func(o medium) bool { return media.Carries(o.kind) })
		if err := b.read(a, cmd.ErrOrStderr(), carries); err != nil {
			return err
		}
		return b.run(cmd.Context(), outputs, func(line string) { fmt.Fprintln(cmd.ErrOrStderr(), line) }, func(path string) { fmt.Fprintln(a.out, path) })
	})
	f := cmd.Flags()
	f.StringVar(&b.from, "from", "", "installer image to build from: its name in a registry, or a file of 'gbctl media build installer'")
	f.StringArrayVar(&b.outputs, "kind", []string{media.InstallerKind}, "KIND or KIND=FILE: what to write, of the kinds of 'gbctl media build'; repeatable")
	renamed(cmd, "output", "o", "kind")
	f.StringArrayVar(&b.overlays, "overlay", nil, "directory whose files are added to the root file system; repeatable")
	f.StringArrayVar(&b.change.Extensions, "extension", nil, "directory with an extension: extension.yaml, files/ and rootfs/; repeatable")
	f.StringArrayVar(&b.change.Remove, "rm", nil, "path in the root file system that is removed first; repeatable")
	f.StringVar(&b.change.Kernel, "kernel", "", "another kernel (vmlinuz); its modules come with --modules")
	f.StringVar(&b.modules, "modules", "", "directory with the modules of the kernel, such as lib/modules, instead of those that are there")
	f.StringVar(&b.firmware, "firmware", "", "directory that is added to /lib/firmware")
	b.add(f, a.err, &b.change.Args)
	f.StringVar(&b.key, "key", "", "file of 'gbctl gen release-key' that signs the system; machines trust it if machine.install.keys or the system has its public half")
	signVar(f, &b.sign)
	f.StringVar(&b.Name, "tag", "", "name of the installer image (default the usual one of its release)")
	mirrorsVar(f, &b.mirrors, pullFrom)
	return cmd
}

// medium is a file to write.
type medium struct{ kind, path string }

func parseOutputs(flags []string) (outputs []medium, err error) {
	for _, flag := range flags {
		kind, path, named := strings.Cut(flag, "=")
		if !slices.Contains(media.Kinds, kind) || named && path == "" {
			return nil, usagef("--kind %q: must be KIND or KIND=FILE, and KIND one of %s", flag, strings.Join(media.Kinds, ", "))
		}
		if !named {
			path = defaultFiles[kind]
		}
		outputs = append(outputs, medium{kind, path})
	}
	return outputs, nil
}

// run makes the system, and then each output of it.
func (b *imageBuild) run(ctx context.Context, outputs []medium, say, made func(line string)) (err error) {
	if from, err := os.Stat(b.from); err == nil {
		for _, o := range outputs {
			if to, err := os.Stat(o.path); err == nil && os.SameFile(from, to) {
				return usagef("--kind: %s is the image to build from: name another file, as --kind %s=FILE", o.path, o.kind)
			}
		}
	}
	work, err := os.MkdirTemp("", "garboard-image-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	dir := filepath.Join(work, "installer")
	bundle := imagebundle.Bundle{Say: say, Mirrors: b.mirrors}
	if err := bundle.Files(ctx, b.from, esp.InstallDir, dir); err != nil {
		return err
	}
	change := b.changes()
	if err := b.secure(&change, dir, work); err != nil {
		return err
	}
	if err := change.Apply(ctx, dir, say); err != nil {
		return err
	}
	installer, err := media.ReadInstaller(dir)
	if err != nil {
		return err
	}
	if installer.Secure && b.Secure == nil {
		say("note: the system was signed for Secure Boot, and isn't any more: sign it with --sign, or machines with Secure Boot refuse it")
	}
	if b.key != "" {
		text, err := readInput(b.key)
		if err != nil {
			return err
		}
		if b.Key, err = pki.ParseKey(text); err != nil {
			return fmt.Errorf("--key: %s: %w", b.key, err)
		}
	} else if b.Key == nil && (!reflect.DeepEqual(change, customize.Change{}) || b.Config != nil || b.Microcode != "") {
		say("note: the system isn't signed, because it was changed: sign it with --key, or machines refuse it unless they have machine.install.unsigned: true")
	}
	options, err := installer.Options(dir, work)
	options.Key, options.Secure = b.Key, b.Secure
	if options = options.With(b.Options); err == nil && b.Microcode != "" {
		err = options.CheckSize(say) // what was checked before has no microcode
	}
	if err != nil {
		return err
	}
	for _, o := range outputs {
		say("writing " + o.path)
		if err := options.Build(ctx, o.kind, o.path); err != nil {
			return fmt.Errorf("%s: %w", o.path, err)
		}
		made(o.path)
	}
	return nil
}

// signVar adds the flag for Secure Boot.
func signVar(f *pflag.FlagSet, dir *string) {
	f.StringVar(dir, "sign", "", "directory of 'gbctl gen secureboot' whose keys sign the system for UEFI Secure Boot; an iso enrols them")
}

// secure adds the boot loader that the system installs, signed, and has modules signed.
func (b *imageBuild) secure(change *customize.Change, dir, work string) (err error) {
	if b.sign == "" {
		return nil
	}
	if b.Secure, err = secureboot.Open(b.sign); err != nil {
		return fmt.Errorf("--sign: %w", err)
	}
	loader, err := os.ReadFile(filepath.Join(dir, "loader", esp.SystemdBoot))
	if err == nil {
		loader, err = b.Secure.DB.Sign(loader)
	}
	signed := filepath.Join(work, "signed")
	if err == nil {
		err = os.Mkdir(signed, 0o700)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(signed, esp.SystemdBoot), loader, 0o644)
	}
	change.SignModule = b.Secure.DB.SignModule
	change.Overlays = append(change.Overlays, customize.Overlay{Name: "signed boot loader", Dir: signed, At: esp.LoaderDir[1:]})
	return err
}

// changes are what the flags say. Other modules replace all that are there.
func (b *imageBuild) changes() customize.Change {
	c := b.change
	add := func(dir, at string) {
		c.Overlays = append(c.Overlays, customize.Overlay{Name: filepath.Base(dir), Dir: dir, At: at})
	}
	if b.modules != "" {
		c.Remove = append(c.Remove, "lib/modules")
		add(b.modules, "lib/modules")
	}
	if b.firmware != "" {
		add(b.firmware, "lib/firmware")
	}
	for _, dir := range b.overlays {
		add(dir, "")
	}
	return c
}

func (a *app) imageProvenanceCommand() *cobra.Command {
	var list bool
	cmd := command("provenance", func(cmd *cobra.Command, _ []string) error {
		file := customize.ProvenanceFile
		if list {
			file = sbom.File
		}
		return a.sequential(cmd.Context(), a.limited(func(ctx context.Context, c *client.Client) error {
			err := client.Receive(ctx, c.File.Read, &apiv1.ReadFileRequest{Path: "/" + file}, func(m *apiv1.FileChunk) error {
				_, err := a.out.Write(m.Data)
				return err
			})
			if connect.CodeOf(err) == connect.CodeNotFound && !list {
				return connect.NewError(connect.CodeNotFound, errors.New("nothing was customized: the system is that of its release"))
			}
			return err
		}))
	})
	cmd.Flags().BoolVar(&list, "sbom", false, "show which software the system has instead, as SPDX")
	return cmd
}
