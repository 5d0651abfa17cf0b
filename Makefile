# Two commands matter: `make up` builds Garboard from source and boots a
# one-node Kubernetes with it, `make test` proves it. `make help` lists the rest.

CLUSTER     ?= garboard-default
PROVISIONER ?= auto
# How many nodes make up makes; without, one, or as many as the cluster has.
CONTROLPLANES ?=
WORKERS       ?=
DEV         := out/dev
comma       := ,
GBCTL       := out/gbctl
# Where the cluster's files are, and how commands name one that isn't the default.
DIR          = $(or $(GARBOARD_HOME),$(HOME)/.garboard)/clusters/$(CLUSTER)
OTHER        = $(if $(filter-out garboard-default,$(CLUSTER)), CLUSTER=$(CLUSTER))

.DEFAULT_GOAL := help

.PHONY: go help up down gbctl console kubectl chart build images media extensions release release-check docs test test-long unit kernel e2e fuzz lint bench outdated setup clean
.PHONY: $(DEV) $(GBCTL) # go's own cache decides what is stale

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  CLUSTER=$(CLUSTER)  PROVISIONER=$(PROVISIONER) (qemu, container, docker or auto)  ARGS=... for kubectl"
	@echo "  CONTROLPLANES=1 WORKERS=0 for up"

# Go from 1.21 on loads the release that go.mod names; older ones only say that they don't know what is in it.
go:
	@go version 2>/dev/null | grep -Eq 'go(1\.(2[1-9]|[3-9][0-9])|[2-9])' || { \
	  echo "go is missing or too old ($$(go version 2>/dev/null || echo none)): install Go 1.26 or newer from https://go.dev/dl and put it on PATH" >&2; exit 1; }

$(DEV): go
	@mkdir -p out && CGO_ENABLED=0 go build -trimpath -o $(DEV) ./tools/dev # static: Docker runs it in the nodes' image

$(GBCTL): go
	@mkdir -p out && version=$$(GOOS= GOARCH= go run ./tools/version) && \
	  CGO_ENABLED=0 go build -trimpath -ldflags="-s -w -X github.com/garboard-os/garboard/boot.Version=$$version" -o $(GBCTL) ./tools/gbctl

gbctl: $(GBCTL) ## build the client: out/gbctl

up: $(DEV) $(GBCTL) ## build everything, boot a cluster, wait until it serves
	@$(DEV) setup --tests=false
	@$(GBCTL) cluster create --merge=false --name $(CLUSTER) --provisioner $(PROVISIONER) \
	  $(if $(CONTROLPLANES),--controlplanes $(CONTROLPLANES)) $(if $(WORKERS),--workers $(WORKERS))
	@echo && $(DEV) kubectl --cluster $(CLUSTER) -- get nodes -o wide && echo
	@printf '  %-10s%s\n' gbctl 'export GARBOARDCONFIG=$(DIR)/garboardconfig; $(GBCTL) services' \
	  kubectl "make kubectl$(OTHER) ARGS='get pods -A'   (or: export KUBECONFIG=$(DIR)/kubeconfig)" \
	  console 'make console$(OTHER)' chart 'make chart$(OTHER)' remove 'make down$(OTHER)'

down: $(GBCTL) ## stop the cluster and remove what make up made of it
	@$(GBCTL) cluster destroy --name $(CLUSTER)

console: LOG = $(DIR)/$(CLUSTER)-$(patsubst $(CLUSTER)-%,%,$(or $(NODE),controlplane-1))/console.log
console: ## show a node's console, and follow it on a terminal (NODE=worker-1)
	@test -e '$(LOG)' || { echo "there is no node $(or $(NODE),controlplane-1) in a cluster $(CLUSTER): 'make up$(OTHER)' starts one" >&2; exit 1; }
	@tail -n +1 $$(test -t 1 && echo -f) '$(LOG)'

kubectl: $(DEV) ## kubectl against the cluster: make kubectl ARGS='get nodes'
	@$(DEV) kubectl --cluster $(CLUSTER) -- $(ARGS)

chart: $(GBCTL) ## the last boot of the first node as a chart
	@GARBOARDCONFIG=$(DIR)/garboardconfig $(GBCTL) -n $(CLUSTER)-controlplane-1 boot-chart

build: $(DEV) ## build kernel, image and components into the cache
	@$(DEV) build

images: $(DEV) ## build the images of a cluster into one file, for a medium: out/images.tar
	@$(DEV) images

media: $(GBCTL) ## build an ISO, a disk image, the files for PXE and an installer image: out
	@$(GBCTL) media build iso -O out/garboard.iso
	@$(GBCTL) media build disk -O out/garboard.raw.zst
	@$(GBCTL) media build pxe -O out/pxe
	@$(GBCTL) media build installer -O out/garboard-installer.tar

extensions: $(DEV) ## make the examples of extensions: out/extensions
	@$(DEV) extensions

docs: go ## make a site of the documents: out/docs/index.html; and the manual of gbctl: out/docs/man
	@go run ./tools/docs out/docs

release: $(DEV) ## make the files of a release (VERSION=v1.2.3; GARBOARD_RELEASE_KEY signs): out/release
	@$(DEV) release --version '$(VERSION)'

release-check: go ## verify a release from its files (DIR=out/release KEYS=release.pub; QEMU=1 BEFORE=DIR: also on a machine, slow)
	@GARBOARD_RELEASE='$(abspath $(or $(DIR),out/release))' GARBOARD_RELEASE_KEYS='$(if $(KEYS),$(abspath $(KEYS)))' \
	  go test -count=1 -v -timeout 30m -run '^TestGivenRelease$$' ./tools/release
	@$(if $(QEMU),GARBOARD_RELEASE='$(abspath $(or $(DIR),out/release))' GARBOARD_RELEASE_BEFORE='$(if $(BEFORE),$(abspath $(BEFORE)))' \
	  go test -count=1 -trimpath -v -timeout 60m -tags=e2e$(comma)long -run '^TestPublishedRelease$$' ./qemu/e2e/installed,:)

CHOICE = $(if $(LIST),--list) $(if $(ALL),--all) $(if $(RUN),--run '$(RUN)')

test: $(DEV) ## for every change: linters, unit tests with -race, nodes and clusters (ALL=1: also those that passed)
	@$(DEV) test $(CHOICE)

test-long: $(DEV) ## the long tests that are due (LIST=1, ALL=1, RUN=regexp, BASE=commit)
	@$(DEV) test-long $(CHOICE) $(if $(BASE),--base '$(BASE)')

unit: $(DEV) ## only the unit tests, with -race
	@$(DEV) test --only unit

kernel: $(DEV) ## only the tests in a kernel of their own (User Mode Linux)
	@$(DEV) test --only kernel

e2e: $(DEV) ## only the end-to-end tests, which boot nodes and clusters (LIST=1, ALL=1, RUN=regexp)
	@$(DEV) test --only e2e $(CHOICE)

fuzz: $(DEV) ## fuzz every target for a minute
	@$(DEV) fuzz

lint: $(DEV) ## gofmt, go vet and staticcheck
	@$(DEV) test --only lint

bench: $(DEV) ## figures beside their budgets (ONLY=install|encryption|…, PROVISIONER, CLUSTERS=3 of several containers)
	@$(DEV) setup --tests=false
	@failed=0; one='(?i)^Benchmark($(or $(ONLY),.*))$$'; \
	  go test -trimpath -tags=e2e -count=1 -run='^$$' -bench="$$one" -benchtime=1x -timeout=0 -v ./qemu/e2e/bench \
	    -provisioner=$(PROVISIONER) -clusters=$(or $(CLUSTERS),1) || failed=1; \
	  go test -trimpath -count=1 -run='^$$' -bench="$$one" -benchtime=1x ./services/system/luks || failed=1; \
	  CGO_ENABLED=0 go test -trimpath -tags=kernel -exec='$(abspath $(DEV)) uml' -count=1 -run='^$$' -bench="$$one" -benchtime=1x \
	    ./services/system/luks || failed=1; \
	  exit $$failed

outdated: $(DEV) ## which modules and components have newer versions
	@$(DEV) outdated

setup: $(DEV) ## install the packages that building and testing need
	@$(DEV) setup

clean: ## remove what was built in this checkout (the cache stays)
	@rm -rf out
