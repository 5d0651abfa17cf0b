package upgradek8s

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/mod/semver"
	"gopkg.in/yaml.v3"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// minor is the second number of a version that is valid: 37 of v1.37.2.
func minor(version string) int {
	n, err := strconv.Atoi(strings.TrimPrefix(semver.MajorMinor(version), "v1."))
	if err != nil {
		panic(fmt.Sprintf("version %q: %v", version, err)) // config.CheckKubernetesVersion has checked it
	}
	return n
}

// skew refuses a change that Kubernetes doesn't support: its components work together over
// one minor version, and an API server reads what the next one has stored, as a new
// storage version is readable by the release before
// (https://kubernetes.io/docs/reference/using-api/deprecation-policy/, rule 4b).
func skew(from, to string) error {
	for _, v := range []string{from, to} {
		if err := config.CheckKubernetesVersion(v); err != nil {
			return err
		}
	}
	switch steps := minor(to) - minor(from); {
	case steps > 1:
		return fmt.Errorf("from %s to %s is more than one minor version: upgrade to the latest v1.%d first", from, to, minor(from)+1)
	case steps < -1:
		return fmt.Errorf("from %s down to %s is more than one minor version: the older API server can't read all that the newer one has stored in etcd; go down to v1.%d first", from, to, minor(from)-1)
	}
	return nil
}

// down is a change to an older version.
func down(from, to string) bool { return semver.Compare(to, from) < 0 }

//go:embed gates.yaml
var gatesYAML []byte

// gates has what each minor version took away: with a feature gate that it doesn't know, or a gate
// that it doesn't allow to change, a component doesn't start.
var gates = func() (all struct {
	Removed map[int][]string
	Locked  map[int]map[string]bool
}) {
	_ = yaml.Unmarshal(gatesYAML, &all) // a test reads it
	return all
}()

// featureGates is the flag with the gates: A=true,B=false.
const featureGates = "feature-gates"

// argsOf reads the extraArgs of each component from the configuration of a node.
func argsOf(config kubeclient.Object) map[string]map[string]string {
	all := map[string]map[string]string{}
	for _, c := range components {
		args, _ := config.At(argsPath(c)...).(map[string]any)
		all[c.name] = map[string]string{}
		for flag, value := range args {
			all[c.name][strings.ReplaceAll(flag, "_", "-")] = fmt.Sprint(value)
		}
	}
	return all
}

func argsPath(c component) []string { return append(slices.Clone(c.path[:len(c.path)-1]), "extraArgs") }

// removed are the settings of the node with which a component of the new version wouldn't
// start.
func (s state) removed(a *apiv1.UpgradeKubernetesRequest) (all []string) {
	for _, c := range components {
		if c.name == kubelet.name && a.NoKubelet || c.name != kubelet.name && !s.ControlPlane {
			continue
		}
		args := s.args[c.name]
		for version := minor(a.From) + 1; version <= minor(a.To); version++ {
			refuse := func(what, why string) {
				all = append(all, fmt.Sprintf("%s doesn't start with %s of %s: %s in v1.%d; remove it from the configuration first, by `gbctl patch mc`",
					c.name, what, strings.Join(argsPath(c), "."), why, version))
			}
			set := parseGates(args[featureGates])
			for _, gate := range slices.Sorted(maps.Keys(set)) {
				if slices.Contains(gates.Removed[version], gate) {
					refuse("the feature gate "+gate, "Kubernetes has removed it")
				}
				if always, locked := gates.Locked[version][gate]; locked && set[gate] == strconv.FormatBool(!always) {
					refuse("the feature gate "+gate+"="+set[gate], fmt.Sprintf("it is always %t", always))
				}
			}
		}
	}
	return all
}

// parseGates reads A=true,kube:B=false, or a list of such texts as it is printed.
func parseGates(text string) map[string]string {
	gates := map[string]string{}
	for _, pair := range strings.FieldsFunc(text, func(c rune) bool { return strings.ContainsRune("[, ]", c) }) {
		name, value, found := strings.Cut(pair, "=")
		if found {
			gates[name[strings.LastIndexByte(name, ':')+1:]] = strings.ToLower(value)
		}
	}
	return gates
}
