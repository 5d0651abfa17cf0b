package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu"
	"github.com/spf13/cobra"
)

// testPackages are what only the tests need: real peers for real protocols.
var testPackages = map[string]string{
	"chrony":               "a real time server for the tests of timed (takes the place of systemd-timesyncd)",
	"cryptsetup-bin":       "encrypted volumes, for the tests of disks and luks",
	"dnsmasq-base":         "a real DHCP server for the tests of networkd",
	"docker.io":            "customizes the system as users do",
	"e2fsprogs":            "disks with somebody's file system on them, for the tests of disks",
	"fdisk":                "a further partition on a stick, for the test of media",
	"iproute2":             "links and namespaces in network tests",
	"kea-dhcp4-server":     "another real DHCP server for the tests of networkd",
	"kea-dhcp6-server":     "likewise, of DHCPv6",
	"libtss2-esys-3.0.2-0": "signs what a TPM measures, in systemd-measure",
	"libtss2-rc0":          "likewise",
	"libtss2-tcti-swtpm0":  "likewise, with a TPM of swtpm",
	"lldpd":                "a real neighbour for the tests of networkd",
	"mitmproxy":            "a proxy that opens TLS, as some sites have one",
	"nfs-ganesha":          "an NFS 4 server for the tests of volumes",
	"nfs-ganesha-vfs":      "the same server's access to files",
	"nftables":             "counts packets in the test of an air gap",
	"opensc":               "signs with keys in tokens, for the tests of secureboot",
	"radvd":                "a router for the tests of networkd",
	"sbsigntool":           "signs and verifies programs for UEFI, for the tests of secureboot",
	"softhsm2":             "a token for the tests of secureboot",
	"swtpm":                "a TPM for the tests of secureboot",
	"tgt":                  "an iSCSI target for the test of extensions",
	"user-mode-linux":      "kernels of their own for tests of disks and links",
	"wireguard-tools":      "shows what networkd has given the links",
	"xfsprogs":             "file systems for the tests of disks",
}

func setupCommand() *cobra.Command {
	var tests bool
	cmd := &cobra.Command{
		Use:   "setup",
		Short: "Install the Debian packages that building and testing need",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return setup(cmd.Context(), cmd.OutOrStdout(), tests)
		},
	}
	cmd.Flags().BoolVar(&tests, "tests", true, "also those that only tests need")
	return cmd
}

// setup makes sure of the Debian packages, with the tests' own where asked. It
// does nothing, quickly and silently, when all are there.
func setup(ctx context.Context, out io.Writer, tests bool) error {
	need := qemu.AptPackages()
	for _, name := range image.AptPackages {
		need[name] = "builds kernel, image and components"
	}
	if tests {
		for name, why := range testPackages {
			need[name] = why
		}
		// Docker's own packages conflict with Debian's.
		if _, err := exec.LookPath("dockerd"); err == nil {
			delete(need, "docker.io")
		}
	}
	missing, err := missingPackages(ctx, need)
	if err != nil || len(missing) == 0 {
		return err
	}
	fmt.Fprintln(out, "Installing what is missing on this machine:")
	for _, name := range missing {
		fmt.Fprintf(out, "  %-24s %s\n", name, need[name])
	}
	return install(ctx, out, missing)
}

// prepared is the checkout that the program was started in, on a machine with the packages
// that building needs, and those of the tests where asked.
func prepared(ctx context.Context, out io.Writer, tests bool) (string, error) {
	root, err := repository()
	if err == nil {
		err = setup(ctx, out, tests)
	}
	return root, err
}

func missingPackages(ctx context.Context, need map[string]string) ([]string, error) {
	if _, err := exec.LookPath("dpkg-query"); err != nil {
		return nil, errors.New("this isn't Debian or Ubuntu (no dpkg-query): building the image takes kernel and tools from Debian packages; use Debian 12 or newer, or a container or VM of it")
	}
	names := slices.Sorted(maps.Keys(need))
	// dpkg-query fails when one is unknown, and still lists the others.
	out, _ := exec.CommandContext(ctx, "dpkg-query", append([]string{"-W", "-f", "${Package} ${db:Status-Status}\n"}, names...)...).Output()
	installed := map[string]bool{}
	for line := range strings.Lines(string(out)) {
		name, status, _ := strings.Cut(strings.TrimSpace(line), " ")
		installed[name] = installed[name] || status == "installed"
	}
	return slices.DeleteFunc(names, func(n string) bool { return installed[n] }), nil
}

func install(ctx context.Context, out io.Writer, packages []string) error {
	var as []string
	if os.Geteuid() != 0 {
		as = []string{"sudo"}
		if _, err := exec.LookPath("sudo"); err != nil {
			return fmt.Errorf("not root, and no sudo; run this as root and try again:\n  apt-get update && apt-get install -y --no-install-recommends %s", strings.Join(packages, " "))
		}
	}
	for _, args := range [][]string{
		{"apt-get", "-q", "update"},
		append([]string{"env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "install", "-y", "--no-install-recommends"}, packages...),
	} {
		full := slices.Concat(as, args)
		fmt.Fprintf(out, "+ %s\n", strings.Join(full, " "))
		cmd := exec.CommandContext(ctx, full[0], full[1:]...)
		// sudo may ask for a password; apt's own lines tell where it is.
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, out, out
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%s: %w; run it yourself, then try again", strings.Join(full, " "), err)
		}
	}
	return nil
}
