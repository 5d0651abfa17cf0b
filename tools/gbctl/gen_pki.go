package main

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
)

// algorithmFlags select the algorithm of a new key.
type algorithmFlags struct{ rsa, ecdsa bool }

func (a *algorithmFlags) add(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&a.rsa, "rsa", false, "make an RSA key instead of an Ed25519 one")
	cmd.Flags().BoolVar(&a.ecdsa, "ecdsa", false, "make an ECDSA (P-256) key instead of an Ed25519 one")
	cmd.MarkFlagsMutuallyExclusive("rsa", "ecdsa")
}

func (a *algorithmFlags) algorithm() pki.Algorithm {
	switch {
	case a.rsa:
		return pki.RSA
	case a.ecdsa:
		return pki.ECDSA
	}
	return pki.Ed25519
}

// validity checks and converts --hours.
func validity(hours int) (time.Duration, error) {
	const most = 100 * 365 * 24 // a time.Duration ends after 292 years
	if hours < 1 || hours > most {
		return 0, usagef("--hours must be from 1 to %d", most)
	}
	return time.Duration(hours) * time.Hour, nil
}

func (g *generator) caCommand() *cobra.Command {
	var algorithm algorithmFlags
	var organization, name string
	var hours int
	cmd := command("ca", func(cmd *cobra.Command, _ []string) error {
		valid, err := validity(hours)
		if err != nil {
			return err
		}
		ca, err := pki.NewCA(algorithm.algorithm(), pkix.Name{Organization: []string{organization}}, g.now(), valid)
		if err != nil {
			return err
		}
		crt, key := name+".crt", name+".key"
		report := fmt.Sprintf("wrote %s and %s: authority %q, valid until %s", crt, key, organization, g.now().Add(valid).Format(time.DateOnly))
		return g.writeAndReport(cmd.OutOrStdout(), report, output{path: crt, data: ca.Cert, mode: publicMode}, output{path: key, data: ca.Key, mode: secretMode})
	})
	cmd.Flags().StringVar(&organization, "organization", pki.MachineName.Organization[0], "organization in the subject of the authority")
	cmd.Flags().StringVar(&name, "name", "ca", "write NAME.crt and NAME.key")
	cmd.Flags().IntVar(&hours, "hours", int(pki.CAValidity/time.Hour), "validity in hours")
	algorithm.add(cmd)
	return cmd
}

func (g *generator) keyCommand() *cobra.Command {
	var algorithm algorithmFlags
	var name string
	cmd := command("key", func(cmd *cobra.Command, _ []string) error {
		key, err := pki.NewKey(algorithm.algorithm())
		if err != nil {
			return err
		}
		path := name + ".key"
		report := fmt.Sprintf("wrote %s\nnext: gbctl gen csr --key %s", path, shellWord(path))
		return g.writeAndReport(cmd.OutOrStdout(), report, output{path: path, data: key, mode: secretMode})
	})
	cmd.Flags().StringVar(&name, "name", "", "write NAME.key")
	must(cmd.MarkFlagRequired("name"))
	algorithm.add(cmd)
	return cmd
}

// releaseKeyCommand makes the key of whoever makes systems.
func (g *generator) releaseKeyCommand() *cobra.Command {
	name := "release"
	cmd := command("release-key", func(cmd *cobra.Command, _ []string) error {
		key, err := pki.NewKey(pki.Ed25519)
		if err != nil {
			return err
		}
		public, err := pki.EncodePublicKey(key)
		if err != nil {
			return err
		}
		report := fmt.Sprintf("wrote %s.key and %s.pub\nnext: gbctl image build --from INSTALLER --key %s, and for machines that run another maker's system:\nmachine: {install: {keys: [%s]}}",
			name, name, shellWord(name+".key"), strings.Split(string(public), "\n")[1])
		return g.writeAndReport(cmd.OutOrStdout(), report, output{path: name + ".key", data: key, mode: secretMode}, output{path: name + ".pub", data: public, mode: publicMode})
	})
	cmd.Flags().StringVar(&name, "name", name, "write NAME.key and NAME.pub")
	return cmd
}

func (g *generator) requestCommand() *cobra.Command {
	var keyPath, name string
	var ips, dns, roles []string
	cmd := command("csr", func(cmd *cobra.Command, _ []string) error {
		base := strings.TrimSuffix(keyPath, ".key")
		leaf := pki.Leaf{CN: name, DNS: dns, Orgs: roles}
		if name == "" {
			leaf.CN = filepath.Base(base)
		}
		if err := checkRoles(roles); err != nil {
			return err
		}
		for _, ip := range ips {
			addr, err := netip.ParseAddr(ip)
			if err != nil {
				return usagef("--ip %q is not an address", ip)
			}
			leaf.IPs = append(leaf.IPs, addr)
		}
		key, err := readInput(keyPath)
		if err != nil {
			return err
		}
		request, err := pki.NewRequest(key, leaf)
		if err != nil {
			return fmt.Errorf("%s: %w", keyPath, err)
		}
		path := base + ".csr"
		report := fmt.Sprintf("wrote %s: %s\nnext: gbctl gen crt --ca ca --csr %s --name %s", path, describe(leaf.CN, leaf.Orgs), shellWord(path), shellWord(base))
		return g.writeAndReport(cmd.OutOrStdout(), report, output{path: path, data: request, mode: publicMode, replace: true})
	})
	f := cmd.Flags()
	f.StringVar(&keyPath, "key", "", "the private key")
	f.StringVar(&name, "name", "", "common name of the certificate (default: the name of the key file)")
	f.StringSliceVar(&ips, "ip", nil, "address in the certificate, repeatable")
	f.StringSliceVar(&dns, "dns", nil, "DNS name in the certificate, repeatable")
	f.StringSliceVar(&roles, "roles", []string{string(api.Admin)}, "roles of the client, separated by commas")
	must(cmd.MarkFlagRequired("key"))
	return cmd
}

// checkRoles refuses misspelt roles. Other organizations are allowed: they are for other
// authorities than that of the machine API.
func checkRoles(roles []string) error {
	for _, role := range roles {
		if strings.HasPrefix(role, "os:") && !slices.Contains(api.Roles(), api.Role(role)) {
			return usagef("--roles: unknown role %q; the roles are %s", role, strings.Join(ofEach(api.Roles(), func(r api.Role) string { return string(r) }), ", "))
		}
	}
	return nil
}

func describe(name string, roles []string) string {
	return strings.Join(append([]string{name}, roles...), ", ")
}

func (g *generator) certificateCommand() *cobra.Command {
	var caName, requestPath, name string
	var hours int
	cmd := command("crt", func(cmd *cobra.Command, _ []string) error {
		valid, err := validity(hours)
		if err != nil {
			return err
		}
		ca, err := readCA(caName)
		if err != nil {
			return err
		}
		text, err := readInput(requestPath)
		if err != nil {
			return err
		}
		request, err := pki.ParseRequest(text)
		if err != nil {
			return fmt.Errorf("%s: %w", requestPath, err)
		}
		leaf := requestedLeaf(request)
		leaf.Now, leaf.Validity = g.now(), valid
		crt, err := ca.Sign(request.PublicKey, leaf)
		if err != nil {
			return err
		}
		made, err := pki.ParseCert(crt)
		if err != nil {
			return err
		}
		path := name + ".crt"
		report := fmt.Sprintf("wrote %s: %s, valid until %s\nnext: set it as crt in the client configuration: base64 -w0 %s",
			path, describe(leaf.CN, leaf.Orgs), made.NotAfter.Format(time.DateOnly), shellWord(path))
		return g.writeAndReport(cmd.OutOrStdout(), report, output{path: path, data: crt, mode: publicMode, replace: sameKey(path, made)})
	})
	f := cmd.Flags()
	f.StringVar(&caName, "ca", "", "the authority: NAME for NAME.crt and NAME.key, or a .yaml file that contains it")
	f.StringVar(&requestPath, "csr", "", "the certificate request")
	f.StringVar(&name, "name", "", "write NAME.crt")
	f.IntVar(&hours, "hours", int(pki.LeafValidity/time.Hour), "validity in hours; it can't exceed that of the authority")
	for _, flag := range []string{"ca", "csr", "name"} {
		must(cmd.MarkFlagRequired(flag))
	}
	return cmd
}

// readCA reads an authority from its two files, or from a file of secrets.
func readCA(name string) (pki.CA, error) {
	if ext := filepath.Ext(name); ext == ".yaml" || ext == ".yml" {
		data, err := readInput(name)
		if err != nil {
			return pki.CA{}, err
		}
		s, err := config.LoadSecrets(name, data)
		if err != nil {
			return pki.CA{}, err
		}
		return s.MachineCA.CA(), nil
	}
	crt, crtErr := readInput(name + ".crt")
	key, keyErr := readInput(name + ".key")
	if err := errors.Join(crtErr, keyErr); errors.Is(err, fs.ErrNotExist) {
		return pki.CA{}, fmt.Errorf("%w\n--ca %s reads %s.crt and %s.key; both are in base64 at machine.ca in the configuration of a control plane", err, name, name, name)
	} else if err != nil {
		return pki.CA{}, err
	}
	ca := pki.CA{Cert: crt, Key: key}
	if _, _, err := ca.Parse(); err != nil {
		return pki.CA{}, fmt.Errorf("%s.crt and %s.key: %w", name, name, err)
	}
	return ca, nil
}

// sameKey reports whether a file contains an earlier certificate for the same key.
func sameKey(path string, made *x509.Certificate) bool {
	data, err := readInput(path)
	if err != nil {
		return false
	}
	old, err := pki.ParseCert(data)
	return err == nil && !old.IsCA && string(old.RawSubjectPublicKeyInfo) == string(made.RawSubjectPublicKeyInfo)
}

// must panics on errors that only a bug can cause.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// requestedLeaf is the content that a request asks for. A request with
// organisations is for a client, which has its roles from them. One with names
// only is for a server, which is also a client of its peers.
func requestedLeaf(request *x509.CertificateRequest) pki.Leaf {
	leaf := pki.Leaf{CN: request.Subject.CommonName, Orgs: request.Subject.Organization, DNS: request.DNSNames, Client: true}
	for _, ip := range request.IPAddresses {
		if addr, ok := netip.AddrFromSlice(ip); ok {
			leaf.IPs = append(leaf.IPs, addr)
		}
	}
	leaf.Server = len(leaf.Orgs) == 0 && len(leaf.DNS)+len(leaf.IPs) > 0
	return leaf
}
