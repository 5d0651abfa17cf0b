package config

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config/pki"
)

// check looks at one subject of a Config with its defaults filled in. A check
// must not depend on an earlier one having passed.
type check func(*Config, *report)

// checks refuse a configuration that can't work. All of them run, in this
// order, whatever the others find. The first problem of a value is the one that is reported.
var checks = []check{
	checkEndpoint,    // endpoint is there
	checkBonds,       // bonds are consistent
	checkValues,      // values are there and possible
	checkAuthorities, // authorities are whole
	checkAccepted,    // accepted authorities are distinct
	checkHostname,    // hostname is valid
	checkResolver,    // resolver asks servers
	checkInterfaces,  // interfaces are consistent
	checkVLANs,       // VLANs are consistent
	checkStack,       // links have what they are made of
	checkEthernet,    // settings of drivers are possible
	checkAddresses,   // addresses and gateways are those of hosts
	checkRules,       // rules are consistent
	checkVIP,         // shared address is possible
	checkFirewall,    // firewall lets its operator in
	checkDisks,       // data disks are distinct
	checkArgs,        // arguments are flags
	checkNodeLabels,  // node labels may be set by a kubelet
	checkRegistries,  // registries are reachable
	checkFiles,       // files are distinct
	checkEnv,         // environment and sysctls are well-formed
	checkEncryption,  // encryption keys are usable
	checkLogging,     // logs have destinations
	checkMetrics,     // metrics have an address
	checkSubnets,     // subnets fit
	checkFamilies,    // address families fit
	checkCNI,         // CNI is chosen once
	checkAudit,       // audit policy is one
}

// maxPort is the largest TCP and UDP port.
const maxPort = 1<<16 - 1

// keyBytes is the length of WireGuard's and of our own symmetric keys.
const keyBytes = 32

func checkKey32(text string) error {
	if data, err := base64.StdEncoding.DecodeString(text); err != nil || len(data) != keyBytes {
		return errors.New("must be base64 of 32 bytes")
	}
	return nil
}

// bootstrapToken is Kubernetes' form of bootstrap tokens.
var bootstrapToken = regexp.MustCompile(`^[a-z0-9]{6}\.[a-z0-9]{16}$`)

func checkToken(token string) error {
	if !IsToken(token) {
		return errors.New("must be six characters, a dot and sixteen characters, all of a-z and 0-9")
	}
	return nil
}

func checkAuthorities(c *Config, r *report) {
	control, older := c.Machine.Type.ControlPlane(), c.SelfHosted()
	for _, a := range Authorities {
		pair, _ := a.Of(c)
		where, missing := fieldsAt(a.Issuing), len(pair.Crt) == 0
		if missing && (a.Workers || control && !(older && a.Name == AggregatorAuthority)) {
			r.lacks(where.with("crt"), "")
		}
		if !missing && len(pair.Key) == 0 && control {
			r.lacks(where.with("key"), "a control plane issues certificates")
		}
		if _, _, err := pair.CA().Parse(); err != nil && !missing {
			r.bad(where, "%v", err)
		}
	}
	if len(c.Cluster.ServiceAccount.Key) == 0 && control && !older {
		r.lacks(at("cluster", "serviceAccount", "key"), "a control plane signs service account tokens")
	}
}

// maxAccepted bounds the accepted secrets, as fields.yaml bounds the authorities: a rotation needs one.
const maxAccepted = 8

func checkAccepted(c *Config, r *report) {
	for _, a := range Authorities {
		issuing, accepted := a.Of(c)
		seen, where := []PEM{issuing.Crt}, fieldsAt(a.Accepted)
		for i, pair := range *accepted {
			switch _, _, err := pair.CA().Parse(); {
			case len(pair.Crt) == 0:
				r.lacks(where.with(i, "crt"), "")
			case err != nil:
				r.bad(where.with(i), "%v", err)
			case slices.ContainsFunc(seen, func(p PEM) bool { return bytes.Equal(p, pair.Crt) }):
				r.bad(where.with(i), "is there twice: in this list, or as the authority that issues")
			}
			seen = append(seen, pair.Crt)
		}
	}
	seen := []PEM{}
	for i, key := range append([]KeyPEM{c.Cluster.ServiceAccount.Key}, c.Cluster.ServiceAccount.AcceptedKeys...) {
		public, err := pki.EncodePublicKey(key)
		where := at("cluster", "serviceAccount", "acceptedKeys", i-1)
		switch {
		case i == 0: // checkAuthorities looks at it
		case err != nil:
			r.bad(where, "%v", err)
		case slices.ContainsFunc(seen, func(p PEM) bool { return bytes.Equal(p, public) }):
			r.bad(where, "is there twice: in this list, or as the key that signs")
		}
		seen = append(seen, public)
	}
	secrets := c.Cluster.AcceptedSecrets
	for i, key := range secrets {
		if checkKey32(string(key)) != nil || c.Cluster.Secret == "" || key == c.Cluster.Secret || slices.Contains(secrets[:i], key) || i == maxAccepted {
			r.bad(at("cluster", "acceptedSecrets", i), "must be base64 of 32 bytes, one of at most %d beside cluster.secret, and in no other place", maxAccepted)
			break
		}
	}
}

// checkEndpoint requires the URL of the Kubernetes API. It is the first that a document lacks.
func checkEndpoint(c *Config, r *report) {
	if c.Cluster.ControlPlane.Endpoint == (URL{}) {
		r.lacks(at("cluster", "controlPlane", "endpoint"), "the URL of the Kubernetes API")
	}
}

func checkKubernetesAPI(u URL) error {
	switch {
	case u.Scheme != "https":
		return fmt.Errorf("must be https, not %s", quote(u.Scheme))
	case lacksColon(u.Hostname()) != nil:
	case u.Port() == "":
		return fmt.Errorf("lacks the port; did you mean https://%s:%d", u.Host, DefaultAPIServerPort)
	case strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil:
		return fmt.Errorf("must be a scheme, a host and a port only; did you mean https://%s", u.Host)
	}
	return checkHost(u.Hostname())
}

func checkReleaseKey(key string) error {
	if _, err := pki.ReleaseKey(key); err != nil {
		return fmt.Errorf("%w: must be the line of base64 in a file of 'gbctl gen release-key', NAME.pub", err)
	}
	return nil
}

func checkKernelArg(arg string) error {
	if err := KernelArg(arg); err != nil || len(arg) <= maxKernelArg {
		return err
	}
	return fmt.Errorf("%s has %d characters, of at most %d", quote(arg), len(arg), maxKernelArg)
}

// KernelArg says why a text isn't one argument of the kernel that means the same to each boot loader.
func KernelArg(arg string) error {
	switch {
	case arg == "" || strings.ContainsFunc(arg, func(r rune) bool { return r <= ' ' || r > '~' || r == '"' }):
		return fmt.Errorf("%s is not one kernel argument of printable characters, without blanks and quotes, such as console=ttyS1", quote(arg))
	case strings.HasPrefix(arg, "garboard.slot="):
		return errors.New("garboard.slot is set by the boot loader")
	}
	return nil
}

func checkDevice(device string) error {
	if !strings.HasPrefix(device, "/dev/") || path.Clean(device) != device {
		return fmt.Errorf("%s is not a device below /dev, such as /dev/sda", quote(device))
	}
	return nil
}

// maxKernelArg bounds one kernel argument. The whole command line has at most 2048 bytes (COMMAND_LINE_SIZE on x86).
const maxKernelArg = 256

// imageReference is looser than the specification: it finds typing errors, and
// the registry decides the rest. The tag or digest is required, because a node
// that restarts must run the same image as before.
var imageReference = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._-]*(:[0-9]+)?(/[a-z0-9._-]+)*(:[a-zA-Z0-9_][a-zA-Z0-9._-]*)?(@sha256:[a-f0-9]{64})?$`)

// program is what the configuration has about a program that the node runs.
type program struct {
	where   place
	args    Args // in extraArgs
	volumes []Volume
}

func (c *Config) programs() []program {
	k := &c.Cluster
	return []program{
		{at("machine", "kubelet"), c.Machine.Kubelet.ExtraArgs, c.Machine.Kubelet.ExtraMounts},
		{at("cluster", "etcd"), k.Etcd.ExtraArgs, nil},
		{at("cluster", "apiServer"), k.APIServer.ExtraArgs, k.APIServer.ExtraVolumes},
		{at("cluster", "controllerManager"), k.ControllerManager.ExtraArgs, k.ControllerManager.ExtraVolumes},
		{at("cluster", "scheduler"), k.Scheduler.ExtraArgs, k.Scheduler.ExtraVolumes},
		{at("cluster", "proxy"), k.Proxy.ExtraArgs, nil},
	}
}

// CheckImage refuses what is no reference of an image, and one that names no version.
func CheckImage(image string) error {
	switch {
	case !imageReference.MatchString(image):
		return fmt.Errorf("%s is not an image reference, such as registry.k8s.io/pause:%s", quote(image), PauseVersion)
	case !strings.Contains(image[strings.LastIndexByte(image, '/')+1:], ":"):
		return fmt.Errorf("%s lacks a tag or a digest", quote(image))
	}
	return nil
}

// checkAbsolute requires an absolute path without "." or ".." and without doubled slashes.
func checkAbsolute(name string) error {
	switch {
	case !path.IsAbs(name):
		return fmt.Errorf("%s is not an absolute path", quote(name))
	case path.Clean(name) != name:
		return fmt.Errorf("%s is not a clean path; did you mean %s", quote(name), path.Clean(name))
	}
	return nil
}

// sumFragment is the SHA-256 of a document in its URL.
var sumFragment = regexp.MustCompile(`^(?i:sha256=[0-9a-f]{64})?$`)

func checkDocument(u URL) error {
	if err := checkHTTP(u); err != nil || sumFragment.MatchString(u.Fragment) {
		return err
	}
	return fmt.Errorf("#%s isn't #sha256= and the 64 hexadecimal digits of the document's sum", u.Fragment)
}

func checkHTTP(u URL) error {
	if u.Scheme != "http" && u.Scheme != "https" {
		return fmt.Errorf("must be http or https, not %s", quote(u.Scheme))
	}
	if numbers.MatchString(u.Hostname()) { // names with an underscore are common here
		return checkHost(u.Hostname())
	}
	return nil
}
