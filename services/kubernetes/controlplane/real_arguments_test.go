//go:build e2e

package controlplane

import (
	"os"
	"testing"

	"github.com/garboard-os/garboard/config"
)

// Real programs start with arguments that exclude defaults of the node: an OpenID issuer, an
// AuthorizationConfiguration, and an authority for one signer. Health needs no name, and everything else one.
func TestRealArguments(t *testing.T) {
	n := &realNode{t: t, dir: t.TempDir(), config: testConfig(t)}
	n.args = config.Args{
		"oidc-issuer-url": {"https://login.example.org"}, "oidc-client-id": {"kubernetes"}, "oidc-username-claim": {"email"},
		"oidc-groups-claim": {"groups"}, "oidc-required-claim": {"hd=example.org", "a=b"}, "oidc-ca-file": {n.path("secrets", "kubernetes", apiServer, "ca.crt")},
		"anonymous-auth": {"false"}, "disable-admission-plugins": {"NodeRestriction"}, "authorization-config": {n.path("authz.yaml")},
	}
	put(t, os.WriteFile(n.path("authz.yaml"), []byte(`apiVersion: apiserver.config.k8s.io/v1
kind: AuthorizationConfiguration
authorizers:
  - {type: Node, name: node}
  - {type: RBAC, name: rbac}
`), 0o600))
	n.prepare()
	signing := n.path("secrets", "kubernetes", controllerManager, "ca")
	n.config.Cluster.ControllerManager.ExtraArgs["cluster-signing-kubelet-serving-cert-file"] = config.Values{signing + ".crt"}
	n.config.Cluster.ControllerManager.ExtraArgs["cluster-signing-kubelet-serving-key-file"] = config.Values{signing + ".key"}
	n.runControllers()
	n.startEtcd()
	n.startProgram(apiServer)
	n.startProgram(controllerManager)
	client := n.admin()
	n.checkManifests(client)
	n.checkBootstrap(client)
	n.checkHealthEndpoints()
}
